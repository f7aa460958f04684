//! Timing: lanes in turn, so that a machine whose speed drifts treats them alike; the state of the machine meanwhile; and
//! what a run may do to the caches before it.

use crate::machine;
use crate::peak::Reader;
use rotile::TierName;
use std::hint::black_box;
use std::time::Instant;

/// Seconds of repeats, sorted.
#[derive(Clone, Debug, PartialEq)]
pub struct Times(Vec<f64>);

impl Times {
    /// Of at least one repeat.
    pub fn new(mut seconds: Vec<f64>) -> Times {
        assert!(!seconds.is_empty(), "no repeat was timed");
        seconds.sort_by(f64::total_cmp);
        Times(seconds)
    }

    /// The fastest.
    pub fn best(&self) -> f64 {
        self.0[0]
    }

    /// The one in the middle.
    pub fn median(&self) -> f64 {
        self.0[self.0.len() / 2]
    }

    /// How many.
    pub fn repeats(&self) -> usize {
        self.0.len()
    }
}

/// What the caches hold when a timed call starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheState {
    /// What the same call left there just before.
    Warm,
    /// Nothing of the call's: a buffer larger than the outermost cache was read in between.
    Cold,
}

impl CacheState {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            CacheState::Warm => "warm",
            CacheState::Cold => "cold",
        }
    }
}

/// Empties the caches by reading through a buffer of twice the outermost one.
#[derive(Debug)]
pub struct Flush(Vec<u64>);

impl Default for Flush {
    fn default() -> Self {
        Self::new()
    }
}

impl Flush {
    /// Allocates the buffer.
    pub fn new() -> Flush {
        // Written, so that every page is memory of its own and not the one page of zeros.
        Flush((0..(2 * machine::last_level_bytes() / 8) as u64).collect())
    }

    /// Reads through it.
    pub fn run(&self) {
        black_box(self.0.iter().fold(0u64, |sum, x| sum.wrapping_add(*x)));
    }
}

/// How quiet the machine was: times of one small loop, spread over the whole run. It reads from L2, since a busy
/// neighbour hardly slows a loop of arithmetic alone.
#[derive(Debug)]
pub struct State {
    reader: Reader,
    buffer: Vec<f32>,
    seconds: Vec<f64>,
}

/// Median over best of the state's loop up to which a run counts as quiet.
const QUIET: f64 = 1.10;

impl State {
    /// Nothing sampled yet.
    pub fn new(tier: TierName) -> State {
        let l2 = machine::caches().get(1).map_or(512 << 10, |cache| cache.bytes);
        State { reader: Reader::new(tier), buffer: vec![1.0; l2 / 2 / 4], seconds: Vec::new() }
    }

    /// One sample, some 50 microseconds.
    pub fn sample(&mut self) {
        self.reader.read(&self.buffer);
        let start = Instant::now();
        for _ in 0..8 {
            self.reader.read(&self.buffer);
        }
        self.seconds.push(start.elapsed().as_secs_f64());
    }

    /// Median over best, and what that is called.
    pub fn summary(&self) -> (f64, &'static str) {
        if self.seconds.is_empty() {
            return (f64::NAN, "not timed");
        }
        let times = Times::new(self.seconds.clone());
        let ratio = times.median() / times.best();
        (ratio, if ratio <= QUIET { "quiet" } else { "noisy" })
    }
}

/// How often to repeat.
#[derive(Clone, Copy, Debug)]
pub struct Repeats {
    /// At least so many, however long they take.
    pub least: usize,
    /// At most so many.
    pub most: usize,
    /// Between those, until all lanes together took so long.
    pub seconds: f64,
}

impl Repeats {
    /// For figures that are quoted: nine at the least.
    pub const CLAIM: Repeats = Repeats { least: 9, most: 101, seconds: 1.5 };
    /// For a first look.
    pub const QUICK: Repeats = Repeats { least: 9, most: 31, seconds: 0.15 };
}

/// Calls of so many seconds bring their data into the caches themselves: the first misses are lost in their time.
const LONG: f64 = 0.02;

/// Runs the lanes in turn, A B A B ..., and samples the machine's state with each turn. One run of each comes first and
/// is not counted. Outside the time, each run is preceded by `flush`, if given, or by a run of the same lane.
pub fn paired(
    repeats: Repeats,
    flush: Option<&Flush>,
    state: &mut State,
    lanes: &mut [&mut dyn FnMut()],
) -> Vec<Times> {
    lanes.iter_mut().for_each(|lane| lane());
    let mut seconds = vec![Vec::new(); lanes.len()];
    let mut spent = 0.0;
    for turn in 0..repeats.most.max(1) {
        if turn >= repeats.least && spent > repeats.seconds {
            break;
        }
        state.sample();
        for (lane, seconds) in lanes.iter_mut().zip(&mut seconds) {
            if let Some(flush) = flush {
                flush.run();
            } else if seconds.last().is_none_or(|took| *took < LONG) {
                // Other lanes ran in between: this one's data goes back to where it was.
                lane();
            }
            let start = Instant::now();
            lane();
            let took = start.elapsed().as_secs_f64();
            seconds.push(took);
            spent += took;
        }
    }
    seconds.into_iter().map(Times::new).collect()
}

/// The exponent `e` of `y = c x^e` that fits best on logarithmic axes (least squares).
///
/// # Panics
///
/// If there are fewer than two different `x`.
pub fn exponent(points: &[(f64, f64)]) -> f64 {
    let n = points.len() as f64;
    let logs: Vec<(f64, f64)> = points.iter().map(|(x, y)| (x.ln(), y.ln())).collect();
    let mean = |f: fn(&(f64, f64)) -> f64| logs.iter().map(f).sum::<f64>() / n;
    let (mx, my) = (mean(|p| p.0), mean(|p| p.1));
    let spread: f64 = logs.iter().map(|p| (p.0 - mx).powi(2)).sum();
    assert!(spread > 0.0, "an exponent needs two different sizes, not {points:?}");
    logs.iter().map(|p| (p.0 - mx) * (p.1 - my)).sum::<f64>() / spread
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponents() {
        let power = |e: f64| [1.0, 2.0, 4.0, 8.0f64].map(|x| (x, 3.0 * x.powf(e)));
        for e in [0.5, 1.0, 2.0] {
            assert!((exponent(&power(e)) - e).abs() < 1e-12);
        }
        // By hand: logs (0, 0), (1, 1), (2, 1) in base 2 have slope 1/2.
        assert!((exponent(&[(1.0, 1.0), (2.0, 2.0), (4.0, 2.0)]) - 0.5).abs() < 1e-12);
    }

    #[test]
    fn times_are_sorted() {
        let times = Times::new(vec![3.0, 1.0, 2.0]);
        assert_eq!((times.best(), times.median(), times.repeats()), (1.0, 2.0, 3));
    }

    #[test]
    fn lanes_take_turns() {
        let order = std::cell::RefCell::new(String::new());
        let repeats = Repeats { least: 2, most: 2, seconds: 0.0 };
        let flush = Flush(vec![1; 100]);
        let mut state = State::new(TierName::Portable);
        let times = paired(
            repeats,
            Some(&flush),
            &mut state,
            &mut [&mut || order.borrow_mut().push('a'), &mut || order.borrow_mut().push('b')],
        );
        assert_eq!(*order.borrow(), "ababab");
        assert_eq!((times.len(), times[0].repeats()), (2, 2));
        assert!(state.summary().0 >= 1.0);
    }
}
