//! The comparator: NaN and infinity are classified first, then `|got - want| <= bound`.
//!
//! A difference of two infinities or with a NaN is never computed, so nothing slips through as "not greater than".

use std::fmt;

/// The largest error of a comparison that passed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MaxError {
    /// Largest absolute error.
    pub error: f64,
    /// Largest error as a fraction of its bound (0 where both are 0).
    pub of_bound: f64,
    /// Index of the element with the largest fraction.
    pub index: usize,
}

/// What is wrong with an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The slices differ in length: `got` and `want` are the lengths, `index` the shorter one.
    Length,
    /// A NaN where a number is wanted.
    UnexpectedNan,
    /// A number where a NaN is wanted.
    MissingNan,
    /// An infinity on one side that the other side does not have, or of the other sign.
    Infinity,
    /// The error exceeds the bound.
    Bound,
    /// The bound itself is negative or not finite: nothing could fail, so this does.
    BadBound,
}

/// The first element that does not compare.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fault {
    /// Which element.
    pub index: usize,
    /// Its value.
    pub got: f64,
    /// The value it should have.
    pub want: f64,
    /// The largest error allowed.
    pub bound: f64,
    /// What is wrong.
    pub kind: Kind,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { index, got, want, bound, kind } = *self;
        match kind {
            Kind::Length => write!(f, "{got} elements, but {want} are wanted"),
            Kind::UnexpectedNan => write!(f, "element {index} is NaN, but {want:e} is wanted"),
            Kind::MissingNan => write!(f, "element {index} is {got:e}, but NaN is wanted"),
            Kind::Infinity => write!(f, "element {index} is {got:e}, but {want:e} is wanted"),
            Kind::Bound => write!(
                f,
                "element {index} is {got:e}, but {want:e} is wanted: error {:e} exceeds {bound:e}",
                (got - want).abs()
            ),
            Kind::BadBound => write!(f, "element {index} has the bound {bound:e}, which would let anything pass"),
        }
    }
}

impl std::error::Error for Fault {}

/// Compares with `|got - want| <= atol + rtol * |want|`.
pub fn close<T: Copy + Into<f64>>(got: &[T], want: &[f64], atol: f64, rtol: f64) -> Result<MaxError, Fault> {
    each(got, want, |_, want| atol + rtol * want.abs())
}

/// Compares element `i` with the bound of its row, `bounds[i / row_len]`; a `row_len` of 1 gives each its own.
pub fn within<T: Copy + Into<f64>>(got: &[T], want: &[f64], row_len: usize, bounds: &[f64]) -> Result<MaxError, Fault> {
    if row_len * bounds.len() != want.len() {
        let (got, want) = ((row_len * bounds.len()) as f64, want.len() as f64);
        return Err(Fault { index: 0, got, want, bound: 0.0, kind: Kind::Length });
    }
    each(got, want, |i, _| bounds[i / row_len])
}

fn each<T: Copy + Into<f64>>(got: &[T], want: &[f64], bound: impl Fn(usize, f64) -> f64) -> Result<MaxError, Fault> {
    if got.len() != want.len() {
        let index = got.len().min(want.len());
        let (got, want) = (got.len() as f64, want.len() as f64);
        return Err(Fault { index, got, want, bound: 0.0, kind: Kind::Length });
    }
    let mut max = MaxError { error: 0.0, of_bound: 0.0, index: 0 };
    for (index, (&got, &want)) in got.iter().zip(want).enumerate() {
        let got: f64 = got.into();
        let fault = |kind, bound| Err(Fault { index, got, want, bound, kind });
        match (got.is_nan(), want.is_nan()) {
            (true, true) => continue,
            (true, false) => return fault(Kind::UnexpectedNan, 0.0),
            (false, true) => return fault(Kind::MissingNan, 0.0),
            (false, false) => {}
        }
        if got.is_infinite() || want.is_infinite() {
            if got == want {
                continue;
            }
            return fault(Kind::Infinity, 0.0);
        }
        let bound = bound(index, want);
        if !bound.is_finite() || bound < 0.0 {
            return fault(Kind::BadBound, bound);
        }
        let error = (got - want).abs();
        if error > bound {
            return fault(Kind::Bound, bound);
        }
        max.error = max.error.max(error);
        let of_bound = if error == 0.0 { 0.0 } else { error / bound };
        if of_bound > max.of_bound {
            (max.of_bound, max.index) = (of_bound, index);
        }
    }
    Ok(max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Rng;

    const N: usize = 101;

    fn good() -> (Vec<f32>, Vec<f64>) {
        let got = Rng::new(1).normal(N);
        let want = got.iter().map(|&x| f64::from(x)).collect();
        (got, want)
    }

    fn kind(got: &[f32], want: &[f64]) -> (usize, Kind) {
        let by_close = close(got, want, 1e-6, 1e-6).expect_err("a planted fault passed `close`");
        let by_row = within(got, want, 1, &vec![1e-6; want.len()]).expect_err("a planted fault passed `within`");
        assert_eq!((by_close.index, by_close.kind), (by_row.index, by_row.kind));
        (by_close.index, by_close.kind)
    }

    #[test]
    fn equal_data_passes() {
        let (got, want) = good();
        assert_eq!(close(&got, &want, 0.0, 0.0), Ok(MaxError { error: 0.0, of_bound: 0.0, index: 0 }));
        let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0];
        let wanted = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 0.0];
        close(&special, &wanted, 0.0, 0.0).unwrap();
        close::<f32>(&[], &[], 0.0, 0.0).unwrap();
    }

    #[test]
    fn one_wrong_element_is_found_wherever_it_is() {
        for at in [0, 1, N / 2, N - 2, N - 1] {
            for wrong in [0.0, 1.0, -1.0, 1e30] {
                let (mut got, want) = good();
                got[at] += wrong + 1e-3;
                assert_eq!(kind(&got, &want), (at, Kind::Bound), "{at} {wrong}");
            }
        }
    }

    #[test]
    fn nan_and_infinity_are_classified_first() {
        for at in [0, N / 2, N - 1] {
            let (mut got, mut want) = good();
            got[at] = f32::NAN;
            assert_eq!(kind(&got, &want), (at, Kind::UnexpectedNan));
            want[at] = f64::INFINITY;
            assert_eq!(kind(&got, &want), (at, Kind::UnexpectedNan));
            got[at] = f32::INFINITY;
            want[at] = f64::NAN;
            assert_eq!(kind(&got, &want), (at, Kind::MissingNan));
            want[at] = f64::NEG_INFINITY;
            assert_eq!(kind(&got, &want), (at, Kind::Infinity));
            want[at] = f64::from(f32::MAX);
            assert_eq!(kind(&got, &want), (at, Kind::Infinity));
            got[at] = f32::MAX;
            want[at] = f64::INFINITY;
            assert_eq!(kind(&got, &want), (at, Kind::Infinity));
        }
    }

    #[test]
    fn an_infinite_want_does_not_loosen_the_bound() {
        assert_eq!(close(&[1.0f32], &[f64::INFINITY], 1.0, 1.0).unwrap_err().kind, Kind::Infinity);
        assert_eq!(close(&[1.0f32], &[2.0], f64::INFINITY, 0.0).unwrap_err().kind, Kind::BadBound);
        assert_eq!(close(&[1.0f32], &[1.0], f64::NAN, 0.0).unwrap_err().kind, Kind::BadBound);
        assert_eq!(within(&[1.0f32], &[1.0], 1, &[-1.0]).unwrap_err().kind, Kind::BadBound);
    }

    #[test]
    fn a_missing_or_extra_element_is_found() {
        let (got, want) = good();
        assert_eq!(close(&got[1..], &want, 1e9, 0.0).unwrap_err().kind, Kind::Length);
        assert_eq!(close(&got, &want[..N - 1], 1e9, 0.0).unwrap_err().kind, Kind::Length);
        assert_eq!(close(&got[..0], &want, 1e9, 0.0).unwrap_err().kind, Kind::Length);
        assert_eq!(within(&got, &want, 2, &[1.0; 50]).unwrap_err().kind, Kind::Length);
        assert_eq!(within(&got[1..], &want, N, &[1e9]).unwrap_err().kind, Kind::Length);
    }

    #[test]
    fn only_its_own_row_s_bound_counts() {
        let want = vec![1.0; 30];
        let mut got = vec![1.0f32; 30];
        let bounds = [1.0, 1e-3, 1.0];
        got[9] = 1.9;
        let max = within(&got, &want, 10, &bounds).unwrap();
        assert!(max.index == 9 && (max.of_bound - 0.9).abs() < 1e-6);
        got[10] = 1.0 + 1.1e-3;
        let fault = within(&got, &want, 10, &bounds).unwrap_err();
        assert_eq!((fault.index, fault.kind, fault.bound), (10, Kind::Bound, 1e-3));
        got[10] = 1.0 + 0.9e-3;
        within(&got, &want, 10, &bounds).unwrap();
    }

    #[test]
    fn just_past_the_bound_fails_and_at_the_bound_passes() {
        close(&[1.25f32], &[1.0], 0.25, 0.0).unwrap();
        close(&[1.25f32], &[1.0], 0.0, 0.25).unwrap();
        close(&[1.25f64], &[1.0], 0.25f64.next_down(), 0.0).unwrap_err();
    }

    #[test]
    fn swapped_rows_are_found() {
        let (mut got, want) = good();
        for i in 0..10 {
            got.swap(20 + i, 50 + i);
        }
        assert_eq!(kind(&got, &want), (20, Kind::Bound));
    }

    #[test]
    fn messages_carry_the_values() {
        let fault = close(&[1.0f32, 2.0], &[1.0, 3.0], 0.5, 0.0).unwrap_err();
        assert_eq!(fault.to_string(), "element 1 is 2e0, but 3e0 is wanted: error 1e0 exceeds 5e-1");
        let fault = close(&[1.0f32], &[1.0, 3.0], 0.5, 0.0).unwrap_err();
        assert_eq!(fault.to_string(), "1 elements, but 2 are wanted");
    }
}
