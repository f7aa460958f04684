//! Seeded data that looks like activations, and arrays whose storage type is known only at run time.

use half::{bf16, f16};
use rand::{Rng as _, SeedableRng, rngs::StdRng};
use rotile_core::{DType, Slice, SliceMut};

/// Elements of one of the storage types.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// f32 elements.
    F32(Vec<f32>),
    /// f16 elements.
    F16(Vec<f16>),
    /// bf16 elements.
    Bf16(Vec<bf16>),
}

impl Data {
    /// `values` rounded to `dtype`, to nearest even.
    ///
    /// # Panics
    ///
    /// If `dtype` is one that the kit does not know.
    pub fn round(values: &[f32], dtype: DType) -> Data {
        match dtype {
            DType::F32 => Data::F32(values.to_vec()),
            DType::F16 => Data::F16(to_f16(values)),
            DType::Bf16 => Data::Bf16(to_bf16(values)),
            other => panic!("the kit has no data of type {other}"),
        }
    }

    /// `len` zeros.
    pub fn zeros(len: usize, dtype: DType) -> Data {
        Data::round(&vec![0.0; len], dtype)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// True if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Storage type.
    pub fn dtype(&self) -> DType {
        self.as_slice().dtype()
    }

    /// The elements, to read.
    pub fn as_slice(&self) -> Slice<'_> {
        match self {
            Data::F32(v) => Slice::F32(v),
            Data::F16(v) => Slice::F16(v),
            Data::Bf16(v) => Slice::Bf16(v),
        }
    }

    /// The elements, to write.
    pub fn as_slice_mut(&mut self) -> SliceMut<'_> {
        match self {
            Data::F32(v) => SliceMut::F32(v),
            Data::F16(v) => SliceMut::F16(v),
            Data::Bf16(v) => SliceMut::Bf16(v),
        }
    }

    /// Widened, exactly.
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            Data::F32(v) => v.clone(),
            Data::F16(v) => v.iter().map(|x| x.to_f32()).collect(),
            Data::Bf16(v) => v.iter().map(|x| x.to_f32()).collect(),
        }
    }

    /// Widened, exactly.
    pub fn to_f64(&self) -> Vec<f64> {
        self.to_f32().into_iter().map(f64::from).collect()
    }
}

/// Rounded to f16, to nearest even.
pub fn to_f16(values: &[f32]) -> Vec<f16> {
    values.iter().map(|&x| f16::from_f32(x)).collect()
}

/// Rounded to bf16, to nearest even.
pub fn to_bf16(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&x| bf16::from_f32(x)).collect()
}

/// A seeded generator: the same seed gives the same data on every machine.
#[derive(Clone, Debug)]
pub struct Rng(StdRng);

impl Rng {
    /// The generator of that seed.
    pub fn new(seed: u64) -> Self {
        Rng(StdRng::seed_from_u64(seed))
    }

    /// Uniform in `[lo, hi)`.
    pub fn uniform(&mut self, lo: f32, hi: f32) -> f32 {
        self.0.random_range(lo..hi)
    }

    /// Uniform in `lo..=hi`.
    pub fn int(&mut self, lo: i64, hi: i64) -> i64 {
        self.0.random_range(lo..=hi)
    }

    /// Uniform in `lo..=hi`.
    pub fn size(&mut self, lo: usize, hi: usize) -> usize {
        self.0.random_range(lo..=hi)
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: u32) -> bool {
        self.0.random_ratio(1, n)
    }

    /// One number, near normal with deviation 1 (a sum of four uniform ones), never 0.
    pub fn unit(&mut self) -> f32 {
        loop {
            let sum: f32 = (0..4).map(|_| self.uniform(-1.0, 1.0)).sum();
            let x = sum * 0.866_025_4;
            if x.abs() > 1e-6 {
                return x;
            }
        }
    }

    /// `len` numbers, near normal with deviation 1, none of them 0.
    pub fn normal(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.unit()).collect()
    }

    /// As [`normal`](Rng::normal), with one element in `every` multiplied by `factor`, as activations have them.
    pub fn with_outliers(&mut self, len: usize, every: u32, factor: f32) -> Vec<f32> {
        (0..len).map(|_| self.unit() * if self.one_in(every) { factor } else { 1.0 }).collect()
    }

    /// `len` whole numbers in `-most..=most`, as f32: sums of few products of them are exact in any order.
    pub fn whole(&mut self, len: usize, most: i64) -> Vec<f32> {
        (0..len).map(|_| self.int(-most, most) as f32).collect()
    }

    /// As [`normal`](Rng::normal), rounded to `dtype`.
    pub fn data(&mut self, len: usize, dtype: DType) -> Data {
        Data::round(&self.normal(len), dtype)
    }

    /// `0..n` in random order.
    pub fn permutation(&mut self, n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            order.swap(i, self.size(0, i));
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeded_data_is_normal_like_and_the_same_each_time() {
        let a = Rng::new(7).normal(10_000);
        assert_eq!(a, Rng::new(7).normal(10_000));
        assert_ne!(a, Rng::new(8).normal(10_000));
        let mean = a.iter().sum::<f32>() / 1e4;
        let square = a.iter().map(|x| x * x).sum::<f32>() / 1e4;
        assert!(mean.abs() < 0.05 && (square - 1.0).abs() < 0.05, "{mean} {square}");
        assert!(a.iter().all(|&x| x != 0.0));
        let outliers = Rng::new(7).with_outliers(10_000, 100, 1000.0).iter().filter(|x| x.abs() > 10.0).count();
        assert!((50..150).contains(&outliers), "{outliers}");
        let mut order = Rng::new(9).permutation(50);
        assert_ne!(order, (0..50).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..50).collect::<Vec<_>>());
    }

    #[test]
    fn rounding_is_to_nearest_even() {
        let d = Data::round(&[1.0 + 1.0 / 2048.0, 1.0 + 3.0 / 2048.0, 65520.0], DType::F16);
        assert_eq!(d.to_f32(), [1.0, 1.0 + 2.0 / 1024.0, f32::INFINITY]);
        let d = Data::round(&[1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0], DType::Bf16);
        assert_eq!(d.to_f32(), [1.0, 1.0 + 2.0 / 128.0]);
        assert_eq!((d.len(), d.dtype(), d.is_empty()), (2, DType::Bf16, false));
    }
}
