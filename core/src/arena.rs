//! Cuts a caller's bytes into aligned runs of f32. Nothing is allocated; contents are arbitrary.

/// Alignment of every run, in bytes: one cache line.
pub(crate) const ALIGN: usize = 64;

/// Floats that a run of `n` takes.
pub(crate) const fn padded(n: usize) -> usize {
    n.next_multiple_of(ALIGN / 4)
}

/// What is left of a workspace.
pub(crate) struct Arena<'a>(&'a mut [f32]);

impl<'a> Arena<'a> {
    /// Takes over `bytes`; up to [`ALIGN`]` - 1` are lost to alignment.
    pub(crate) fn new(bytes: &'a mut [u8]) -> Self {
        let skip = bytes.as_ptr().align_offset(ALIGN).min(bytes.len());
        // SAFETY: every bit pattern is an f32.
        let (_, floats, _) = unsafe { bytes[skip..].align_to_mut::<f32>() };
        Arena(floats)
    }

    /// The next `n` floats. The planner sized the arena; running out is a bug, and a panic.
    pub(crate) fn take(&mut self, n: usize) -> &'a mut [f32] {
        let (run, rest) = core::mem::take(&mut self.0).split_at_mut(padded(n));
        self.0 = rest;
        &mut run[..n]
    }
}

/// The start of a run of an [`Arena`] as half as many f64.
pub(crate) fn as_f64(run: &mut [f32]) -> &mut [f64] {
    // SAFETY: every bit pattern is an f64.
    let (head, doubles, _) = unsafe { run.align_to_mut::<f64>() };
    assert!(head.is_empty(), "runs of an arena are aligned");
    doubles
}
