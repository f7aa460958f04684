//! Seeded data at the start of a cache line, as allocators of runtimes place it: a Vec may start in the middle of a line,
//! and every second vector load would then touch two.

use rotile::{DType, Slice, SliceMut};
use rotile_testkit::data::Data;

/// Bytes that a buffer starts at a multiple of: a page, so that cache sets do not depend on the allocator either.
const ALIGN: usize = 4096;
/// Values drawn; longer data repeats them. A prime, so that no two rows of a tensor are the same.
const DRAWN: usize = 262_139;

/// Plain memory at the start of a page.
#[derive(Debug)]
pub(crate) struct Aligned<T> {
    data: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Copy + Default> Aligned<T> {
    pub(crate) fn new(len: usize) -> Self {
        let size = size_of::<T>();
        let data = vec![T::default(); len + ALIGN / size];
        let address = data.as_ptr() as usize;
        Aligned { start: (address.next_multiple_of(ALIGN) - address) / size, data, len }
    }

    pub(crate) fn get(&self) -> &[T] {
        &self.data[self.start..self.start + self.len]
    }

    pub(crate) fn get_mut(&mut self) -> &mut [T] {
        &mut self.data[self.start..self.start + self.len]
    }
}

/// Elements of one type.
#[derive(Debug)]
pub(crate) struct Buffer {
    data: Data,
    start: usize,
    len: usize,
}

impl Buffer {
    /// `len` values near normal, none of them 0: a kernel over zeros would be timed on luck.
    pub(crate) fn normal(dtype: DType, len: usize, seed: u64) -> Buffer {
        let drawn = Data::round(&normal(len.min(DRAWN), seed), dtype);
        let mut buffer = Buffer::zeros(dtype, len);
        macro_rules! repeat {
            ($from:expr, $to:expr) => {
                $to.chunks_mut(DRAWN).for_each(|chunk| chunk.copy_from_slice(&$from[..chunk.len()]))
            };
        }
        match (drawn.as_slice(), buffer.as_slice_mut()) {
            (Slice::F32(from), SliceMut::F32(to)) => repeat!(from, to),
            (Slice::F16(from), SliceMut::F16(to)) => repeat!(from, to),
            (Slice::Bf16(from), SliceMut::Bf16(to)) => repeat!(from, to),
            _ => unreachable!("both are of one type"),
        }
        buffer
    }

    /// `len` zeros, to be written.
    pub(crate) fn zeros(dtype: DType, len: usize) -> Buffer {
        let data = Data::zeros(len + ALIGN / dtype.size(), dtype);
        let address = data.as_slice().address(0) as usize;
        let start = (address.next_multiple_of(ALIGN) - address) / dtype.size();
        Buffer { data, start, len }
    }

    pub(crate) fn as_slice(&self) -> Slice<'_> {
        let range = self.start..self.start + self.len;
        match self.data.as_slice() {
            Slice::F32(s) => s[range].into(),
            Slice::F16(s) => s[range].into(),
            Slice::Bf16(s) => s[range].into(),
            other => other,
        }
    }

    pub(crate) fn as_slice_mut(&mut self) -> SliceMut<'_> {
        let range = self.start..self.start + self.len;
        match self.data.as_slice_mut() {
            SliceMut::F32(s) => (&mut s[range]).into(),
            SliceMut::F16(s) => (&mut s[range]).into(),
            SliceMut::Bf16(s) => (&mut s[range]).into(),
            other => other,
        }
    }

    /// The elements, where they are f32.
    pub(crate) fn f32(&self) -> &[f32] {
        match &self.data {
            Data::F32(s) => &s[self.start..self.start + self.len],
            _ => panic!("a buffer of {}, not of f32", self.data.dtype()),
        }
    }

    /// The elements, to write, where they are f32.
    pub(crate) fn f32_mut(&mut self) -> &mut [f32] {
        match &mut self.data {
            Data::F32(s) => &mut s[self.start..self.start + self.len],
            other => panic!("a buffer of {}, not of f32", other.dtype()),
        }
    }

    /// Widened, exactly.
    pub(crate) fn to_f32(&self) -> Vec<f32> {
        self.data.to_f32()[self.start..self.start + self.len].to_vec()
    }
}

/// Sums of four uniform numbers, scaled to deviation 1, from SplitMix64: under valgrind a stronger generator would take most
/// of the time.
fn normal(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut draw = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let x = x ^ (x >> 31);
        let sum: i32 = [x, x >> 16, x >> 32, x >> 48].into_iter().map(|part| i32::from(part as i16)).sum();
        // 1/3 is the variance of one uniform number in -1..1; a sum of 0 becomes small instead.
        let value = sum as f32 / 32768.0 * 0.866_025_4;
        if sum == 0 { 1e-3 } else { value }
    };
    (0..len).map(|_| draw()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_start_at_a_page_and_hold_no_zero() {
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let buffer = Buffer::normal(dtype, DRAWN + 100, 7);
            let values = buffer.to_f32();
            assert!(values.len() == DRAWN + 100 && values.iter().all(|x| *x != 0.0));
            assert_eq!(values[DRAWN..], values[..100]);
            let square = values.iter().map(|x| x * x).sum::<f32>() / values.len() as f32;
            assert!((square - 1.0).abs() < 0.02, "{square}");
        }
        assert_eq!(Aligned::<f64>::new(10).get().as_ptr() as usize % ALIGN, 0);
        assert_eq!(Buffer::normal(DType::F32, 10, 7).f32().as_ptr() as usize % ALIGN, 0);
    }
}
