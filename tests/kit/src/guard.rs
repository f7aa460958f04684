//! Buffers with an inaccessible page on either side, so that a read or write past the end is a fault and not luck.

#[cfg(not(unix))]
compile_error!("rotile-testkit: guard pages need mmap; the kit is for Unix hosts only");

use half::{bf16, f16};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

mod sealed {
    pub trait Sealed {}
}

/// Element types that a guarded buffer can hold: every bit pattern is a value.
pub trait Element: Copy + sealed::Sealed + 'static {}

macro_rules! elements {
    ($($t:ty),*) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {}
    )*};
}
elements!(f32, f16, bf16, u8, f64, u16, u32);

/// Which guard page the buffer touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The first element follows the guard page in front, apart from that many elements in between.
    Start(usize),
    /// The guard page behind follows the last element, apart from that many elements in between.
    End(usize),
}

impl Side {
    /// Touching the guard page in front; starts on a page boundary.
    pub const START: Side = Side::Start(0);
    /// Touching the guard page behind; the start is aligned only as the length makes it.
    pub const END: Side = Side::End(0);
}

/// What the bytes of the buffer's pages hold that are not the buffer's own.
const CANARY: u8 = 0xa5;

/// A slice of `T` in pages of its own, between two pages that fault on any access.
///
/// The bytes between the slice and the far guard page hold a pattern, which [`check`](Guarded::check) and `drop`
/// look at: a write there is found as well.
#[derive(Debug)]
pub struct Guarded<T: Element> {
    map: NonNull<u8>,
    map_len: usize,
    page: usize,
    start: NonNull<T>,
    len: usize,
}

impl<T: Element> Guarded<T> {
    /// `len` elements of `value`.
    ///
    /// # Panics
    ///
    /// If the pages can't be had.
    pub fn filled(len: usize, value: T, side: Side) -> Self {
        let mut buffer = Self::canaries(len, side);
        buffer.fill(value);
        buffer
    }

    /// A copy of `values`.
    ///
    /// # Panics
    ///
    /// If the pages can't be had.
    pub fn from_slice(values: &[T], side: Side) -> Self {
        let mut buffer = Self::canaries(values.len(), side);
        buffer.copy_from_slice(values);
        buffer
    }

    fn canaries(len: usize, side: Side) -> Self {
        let page = page_size();
        let bytes = len.checked_mul(size_of::<T>()).expect("buffer size fits in usize");
        let (Side::Start(away) | Side::End(away)) = side;
        let away = away.checked_mul(size_of::<T>()).expect("buffer size fits in usize");
        let inner = (bytes + away).max(1).div_ceil(page) * page;
        let map_len = inner + 2 * page;
        // SAFETY: a fresh private anonymous mapping; no address is asked for, so no memory of anyone's is replaced.
        let map = unsafe {
            libc::mmap(std::ptr::null_mut(), map_len, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        assert!(map != libc::MAP_FAILED, "mmap of {map_len} bytes: {}", std::io::Error::last_os_error());
        let map = NonNull::new(map.cast::<u8>()).expect("mmap succeeded");
        // SAFETY: the mapping has `inner + 2 * page` bytes.
        let data = unsafe { map.add(page) };
        // SAFETY: `data..data + inner` are whole pages of the mapping above, which nothing refers to yet.
        let done = unsafe { libc::mprotect(data.as_ptr().cast(), inner, libc::PROT_READ | libc::PROT_WRITE) };
        assert!(done == 0, "mprotect: {}", std::io::Error::last_os_error());
        // SAFETY: these bytes have just been made writable, and nothing else refers to them.
        unsafe { data.write_bytes(CANARY, inner) };
        let skip = match side {
            Side::Start(_) => away,
            Side::End(_) => inner - away - bytes,
        };
        // SAFETY: `skip + bytes <= inner`, so the result lies in the accessible pages (or at their end, if empty).
        let start = unsafe { data.add(skip) }.cast::<T>();
        assert!(start.is_aligned(), "page sizes and lengths in whole elements keep elements aligned");
        Guarded { map, map_len, page, start, len }
    }

    /// Whether the bytes around the slice are as they were.
    ///
    /// # Panics
    ///
    /// If they are not, with the distance in bytes from the slice.
    pub fn check(&self) {
        let inner = self.map_len - 2 * self.page;
        // SAFETY: `inner` bytes from one page into the mapping are accessible and initialised; the reference lives
        // for this call only, in which `&self` keeps writers away.
        let all = unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(self.page), inner) };
        let skip = self.start.as_ptr() as usize - all.as_ptr() as usize;
        let end = skip + self.len * size_of::<T>();
        if let Some(i) = all[..skip].iter().rposition(|&b| b != CANARY) {
            panic!("written {} bytes before a buffer of {} elements", skip - i, self.len);
        }
        if let Some(i) = all[end..].iter().position(|&b| b != CANARY) {
            panic!("written {} bytes past a buffer of {} elements", i + 1, self.len);
        }
    }
}

impl<T: Element> Deref for Guarded<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements from `start` are accessible, aligned, initialised (any bytes are a `T`, `Element` is
        // sealed to such types), and owned by `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Element> DerefMut for Guarded<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as for `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T: Element> Drop for Guarded<T> {
    fn drop(&mut self) {
        struct Unmap(NonNull<u8>, usize);
        impl Drop for Unmap {
            fn drop(&mut self) {
                // SAFETY: exactly the mapping that `canaries` made; its owner is being dropped, so nothing refers to it.
                unsafe { libc::munmap(self.0.as_ptr().cast(), self.1) };
            }
        }
        let _unmap = Unmap(self.map, self.map_len);
        if !std::thread::panicking() {
            self.check();
        }
    }
}

// SAFETY: the buffer owns its pages alone, as a `Vec<T>` owns its memory, and the elements are plain numbers.
unsafe impl<T: Element> Send for Guarded<T> {}
// SAFETY: `&Guarded<T>` only gives `&[T]` of plain numbers.
unsafe impl<T: Element> Sync for Guarded<T> {}

/// Bytes of a page of this host (of the emulated one under user emulation).
pub fn page_size() -> usize {
    // SAFETY: sysconf has no preconditions.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).ok().filter(|s| s.is_power_of_two()).expect("the page size is a power of two")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placement_and_alignment_are_as_asked() {
        let page = page_size();
        for len in [0usize, 1, 3, 1023, 1024, 1025, 5000] {
            for away in [0usize, 1, 7, 2000] {
                let b = Guarded::filled(len, 1.5f32, Side::Start(away));
                assert_eq!(b.as_ptr() as usize % page, away * 4 % page);
                let mut b = Guarded::filled(len, 2.5f32, Side::End(away));
                assert_eq!((b.as_ptr_range().end as usize + away * 4) % page, 0);
                assert!(b.iter().all(|&x| x == 2.5) && b.len() == len);
                b.iter_mut().for_each(|x| *x = 0.0);
            }
        }
        let b = Guarded::from_slice(&[f16::ONE, f16::ZERO, f16::NAN], Side::END);
        assert_eq!(b.as_ptr() as usize % 4, 2);
        assert_eq!(b[0], f16::ONE);
        assert_eq!(Guarded::from_slice(&[1u8, 2], Side::END)[..], [1, 2]);
    }

    #[test]
    fn the_pages_on_both_sides_are_inaccessible() {
        // Asks the kernel to read the byte for us: it reports EFAULT where a load would be a fault.
        let readable = |at: *const u8| {
            let mut pipe = [0; 2];
            // SAFETY: `pipe` has room for two descriptors.
            assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
            // SAFETY: the system call checks the address itself.
            let n = unsafe { libc::write(pipe[1], at.cast(), 1) };
            for fd in pipe {
                // SAFETY: both were opened above, and are closed once.
                unsafe { libc::close(fd) };
            }
            n == 1
        };
        let page = page_size();
        let b = Guarded::filled(page, 0u8, Side::END);
        let start = b.as_ptr();
        assert!(readable(start) && readable(start.wrapping_add(page - 1)));
        assert!(!readable(start.wrapping_sub(1)) && !readable(start.wrapping_sub(page)));
        assert!(!readable(start.wrapping_add(page)) && !readable(start.wrapping_add(2 * page - 1)));
    }

    #[test]
    fn a_write_next_to_the_slice_is_found() {
        for (side, at) in [(Side::Start(3), -1isize), (Side::START, 8), (Side::END, -1), (Side::End(1), 8)] {
            let b = Guarded::filled(8, 0.0f32, side);
            let outside = b.as_ptr().cast_mut().wrapping_offset(at);
            // SAFETY: one element outside the slice, inside the buffer's accessible pages; nothing refers to it.
            unsafe { outside.write(0.0) };
            let found = std::panic::catch_unwind(|| b.check());
            assert!(found.is_err(), "{side:?}");
            // SAFETY: as above.
            unsafe { outside.cast::<u8>().write_bytes(CANARY, 4) };
            b.check();
        }
    }
}
