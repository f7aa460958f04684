//! Executors: who runs the tasks of a call. All take tasks on demand, so that a slow core takes fewer; none spins, pins or
//! keeps a global. With one thread, nothing is started and nothing waits.

use crate::{Batch, Error, Executor, Plan};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

type Body<'a> = dyn Fn(usize, &mut [u8]) + Sync + 'a;

/// Runs tasks, taken from a shared counter, until there are none.
fn work(next: &AtomicUsize, tasks: usize, workspace: &mut [u8], body: &Body<'_>) {
    loop {
        let task = next.fetch_add(1, Ordering::Relaxed);
        if task >= tasks {
            break;
        }
        body(task, workspace);
    }
}

/// Makes sure of `len` bytes.
fn grow(bytes: &mut Vec<u8>, len: usize, what: &'static str) -> Result<(), Error> {
    let have = bytes.len();
    if have < len {
        bytes.try_reserve_exact(len - have).map_err(|_| Error::TooShort { what: what.into(), need: len, have })?;
        bytes.resize(len, 0);
    }
    Ok(())
}

/// One workspace for each thread.
fn grow_all(workspaces: &mut [Vec<u8>], len: usize) -> Result<(), Error> {
    workspaces.iter_mut().try_for_each(|workspace| grow(workspace, len, "memory for a workspace"))
}

/// Scoped threads, started for each phase of a call: no state, and some 20 microseconds for each start.
#[derive(Debug)]
pub struct Threads {
    workspaces: Vec<Vec<u8>>,
}

impl Threads {
    /// `threads` threads, the calling one among them; 0 counts as 1.
    pub fn new(threads: usize) -> Self {
        Threads { workspaces: vec![Vec::new(); threads.max(1)] }
    }
}

impl Default for Threads {
    fn default() -> Self {
        Threads::new(1)
    }
}

// SAFETY: an index is handed out by one atomic increment, so once; the scope joins every thread before `for_each`
// returns; every thread has a workspace of its own.
unsafe impl Executor for Threads {
    fn prepare(&mut self, workspace_len: usize) -> Result<(), Error> {
        grow_all(&mut self.workspaces, workspace_len)
    }

    fn for_each(&mut self, tasks: usize, body: &Body<'_>) {
        let next = &AtomicUsize::new(0);
        let threads = self.workspaces.len().min(tasks.max(1));
        let (own, others) = self.workspaces[..threads].split_first_mut().expect("at least one");
        std::thread::scope(|scope| {
            for workspace in others {
                scope.spawn(move || work(next, tasks, workspace, body));
            }
            work(next, tasks, own, body);
        });
    }
}

/// Threads that live as long as the pool and sleep between calls: for steps so short that starting threads would show.
///
/// ```
/// # use rotile::{Pool, Runner};
/// let mut runner = Runner::on(Pool::new(4)?); // then `runner.run(&plan, &mut batch)` for each step
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    workspaces: Vec<Vec<u8>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// There are seats to take, or the pool ends.
    wake: Condvar,
    /// A worker has left the job.
    left: Condvar,
}

#[derive(Debug, Default)]
struct State {
    job: Option<Job>,
    /// Workers that may still join the job; each takes the workspace of its seat.
    seats: usize,
    /// Workers at the job.
    busy: usize,
    /// What a task panicked with.
    panic: Option<Panic>,
    ends: bool,
}

struct Panic(Box<dyn Any + Send>);

impl std::fmt::Debug for Panic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Panic")
    }
}

/// A phase under way: pointers to what `Pool::for_each` holds on its stack.
#[derive(Clone, Copy, Debug)]
struct Job {
    body: *const Body<'static>,
    next: *const AtomicUsize,
    tasks: usize,
    /// Workspaces of the workers, one for each seat.
    workspaces: *mut Vec<u8>,
}

// SAFETY: the body and the counter are `Sync`, workspaces are handed out one to a seat, and `Pool::for_each` keeps all of
// them alive until no worker is at the job.
unsafe impl Send for Job {}

impl Shared {
    /// No code that can panic runs under the lock, so it is never poisoned for good.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn serve(&self) {
        let mut state = self.lock();
        loop {
            if state.ends {
                return;
            }
            let (Some(job), 1..) = (state.job, state.seats) else {
                state = self.wake.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
                continue;
            };
            state.seats -= 1;
            state.busy += 1;
            let seat = state.seats;
            drop(state);
            // SAFETY: this worker is counted as busy, so `for_each` waits for it and what the job points to is alive; the
            // seat, and with it the workspace, is this worker's alone.
            let (body, next, workspace) =
                unsafe { (&*job.body, &*job.next, (*job.workspaces.add(seat)).as_mut_slice()) };
            let result = catch_unwind(AssertUnwindSafe(|| work(next, job.tasks, workspace, body)));
            state = self.lock();
            if let Err(panic) = result {
                state.panic = Some(Panic(panic));
            }
            state.busy -= 1;
            self.left.notify_one();
        }
    }
}

impl Pool {
    /// `threads` threads, the calling one among them; 0 counts as 1.
    ///
    /// # Errors
    ///
    /// The system's, if it can't start a thread.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let mut pool =
            Pool { shared: Arc::default(), handles: Vec::new(), workspaces: vec![Vec::new(); threads.max(1)] };
        for i in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("rotile-{i}"));
            // On an error, dropping the pool ends the threads before.
            pool.handles.push(builder.spawn(move || shared.serve())?);
        }
        Ok(pool)
    }

    /// Threads, the calling one among them.
    pub fn threads(&self) -> usize {
        self.workspaces.len()
    }
}

// SAFETY: an index is handed out by one atomic increment, so once; `for_each` returns when nobody can join any more and
// nobody is busy, which the lock makes visible; every seat has a workspace of its own.
unsafe impl Executor for Pool {
    fn prepare(&mut self, workspace_len: usize) -> Result<(), Error> {
        grow_all(&mut self.workspaces, workspace_len)
    }

    fn for_each(&mut self, tasks: usize, body: &Body<'_>) {
        let next = AtomicUsize::new(0);
        let (own, others) = self.workspaces.split_first_mut().expect("at least one");
        let seats = others.len().min(tasks.saturating_sub(1));
        if seats == 0 {
            return work(&next, tasks, own, body);
        }
        // SAFETY: only the lifetime changes; no worker uses the pointer after this function.
        let body_for_all = unsafe { std::mem::transmute::<*const Body<'_>, *const Body<'static>>(body) };
        let mut state = self.shared.lock();
        state.job = Some(Job { body: body_for_all, next: &next, tasks, workspaces: others.as_mut_ptr() });
        state.seats = seats;
        drop(state);
        for _ in 0..seats {
            self.shared.wake.notify_one();
        }
        let result = catch_unwind(AssertUnwindSafe(|| work(&next, tasks, own, body)));
        let mut state = self.shared.lock();
        // Whoever has not come by now finds nothing left to do.
        (state.seats, state.job) = (0, None);
        while state.busy > 0 {
            state = self.shared.left.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        let panic = state.panic.take();
        drop(state);
        if let Some(panic) = result.err().or(panic.map(|panic| panic.0)) {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.lock().ends = true;
        self.shared.wake.notify_all();
        for handle in self.handles.drain(..) {
            // A worker catches every panic.
            let _ = handle.join();
        }
    }
}

/// The threads of the rayon pool that is current where a call runs: `pool.install(|| runner.run(..))` chooses another.
#[cfg(feature = "rayon")]
#[derive(Debug)]
pub struct Rayon {
    workspaces: Vec<Vec<u8>>,
}

#[cfg(feature = "rayon")]
impl Rayon {
    /// Workspaces come with the first call; without them, one job runs all tasks.
    pub fn new() -> Self {
        Rayon { workspaces: vec![Vec::new()] }
    }
}

#[cfg(feature = "rayon")]
impl Default for Rayon {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: an index is handed out by one atomic increment, so once; the scope ends when every job has ended; every job has a
// workspace of its own.
#[cfg(feature = "rayon")]
unsafe impl Executor for Rayon {
    fn prepare(&mut self, workspace_len: usize) -> Result<(), Error> {
        self.workspaces.resize_with(rayon::current_num_threads().max(1), Vec::new);
        grow_all(&mut self.workspaces, workspace_len)
    }

    fn for_each(&mut self, tasks: usize, body: &Body<'_>) {
        let next = &AtomicUsize::new(0);
        let jobs = self.workspaces.len().min(tasks);
        if let [own] = &mut self.workspaces[..jobs] {
            return work(next, tasks, own, body);
        }
        rayon::scope(|scope| {
            for workspace in &mut self.workspaces[..jobs] {
                scope.spawn(move |_| work(next, tasks, workspace, body));
            }
        });
    }
}

/// Keeps an executor, its workspaces and the scratch from call to call.
#[derive(Debug, Default)]
pub struct Runner<E = Threads> {
    executor: E,
    scratch: Vec<u8>,
}

impl Runner {
    /// Runs on `threads` scoped threads, the calling one among them.
    pub fn new(threads: usize) -> Self {
        Runner::on(Threads::new(threads))
    }
}

impl<E: Executor> Runner<E> {
    /// Runs on `executor`.
    pub fn on(executor: E) -> Self {
        Runner { executor, scratch: Vec::new() }
    }

    /// Prepares and runs one step.
    ///
    /// # Errors
    ///
    /// As [`Plan::prepare`]; nothing has been written then.
    pub fn run(&mut self, plan: &Plan, batch: &mut Batch<'_>) -> Result<(), Error> {
        grow(&mut self.scratch, plan.scratch_len(batch.sequences), "memory for scratch")?;
        plan.prepare(batch, &mut self.scratch)?.run_on(&mut self.executor)
    }
}
