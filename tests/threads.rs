//! Executors run every task once and change no bits, and tasks are cut so that many threads, equal or not, stay busy.

use rotile::rotary::RotarySpec;
use rotile::{
    AttentionSpec, Batch, Capabilities, Executor, Keys, Operands, Operation, Plan, Pool, Rayon, Runner, Sequence,
    Shape, Tensor, TensorMut, Threads,
};
use rotile_testkit::data::Rng;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A batch with a prompt, a chunk and two decoding sequences, run on an executor.
struct Problem {
    plan: Plan,
    q: Vec<f32>,
    kv: Vec<f32>,
}

const HEADS: (usize, usize, usize) = (4, 2, 16);
const LENGTHS: [(usize, usize); 4] = [(1, 2500), (90, 90), (20, 300), (1, 64)];

impl Problem {
    fn new(threads: usize) -> Problem {
        let mut capabilities = rotile::capabilities().unwrap();
        capabilities.threads = threads;
        let spec = AttentionSpec::attend(HEADS.0, HEADS.1, HEADS.2, RotarySpec::none());
        let mut rng = Rng::new(3);
        let tokens = |f: fn(&(usize, usize)) -> usize| LENGTHS.iter().map(f).sum::<usize>();
        let (q, kv) = (tokens(|l| l.0) * HEADS.0 * HEADS.2, tokens(|l| l.1) * HEADS.1 * HEADS.2);
        Problem { plan: Plan::new(&capabilities, &spec).unwrap(), q: rng.normal(q), kv: rng.normal(kv) }
    }

    fn run(&self, runner: &mut Runner<impl Executor>) -> Vec<u32> {
        let mut out = vec![f32::NAN; self.q.len()];
        let shape = |len: usize, heads| Shape { batch: 1, tokens: len / heads / HEADS.2, heads, dim: HEADS.2 };
        let (q, kv) = (shape(self.q.len(), HEADS.0), shape(self.kv.len(), HEADS.1));
        let (mut q_at, mut kv_at) = (0, 0);
        let sequences = LENGTHS.map(|(q_len, kv_len)| {
            let mut s = Sequence::new(q_len, kv_len);
            (s.q.token, s.kv.token) = (q_at, kv_at);
            (q_at, kv_at) = (q_at + q_len, kv_at + kv_len);
            s
        });
        let operands = Operands::Attend {
            q: Tensor::token_major(&self.q[..], q).unwrap(),
            k: Tensor::token_major(&self.kv[..], kv).unwrap(),
            v: Tensor::token_major(&self.kv[..], kv).unwrap(),
            out: TensorMut::token_major(&mut out[..], q).unwrap(),
            lse: None,
        };
        runner.run(&self.plan, &mut Batch::new(operands, &sequences)).unwrap();
        out.iter().map(|x| x.to_bits()).collect()
    }
}

#[test]
fn executors_and_thread_counts_change_no_bits() {
    let plain = Problem::new(1).run(&mut Runner::new(1));
    assert!(plain.iter().all(|x| f32::from_bits(*x).is_finite()));
    let rayon = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    for threads in [1, 2, 3, 4, 7, 16, 64] {
        let problem = Problem::new(threads);
        let mut pool = Runner::on(Pool::new(threads).unwrap());
        for round in 0..3 {
            assert_eq!(problem.run(&mut pool), plain, "pool of {threads}, call {round}");
        }
        assert_eq!(problem.run(&mut Runner::new(threads)), plain, "{threads} scoped threads");
        assert_eq!(rayon.install(|| problem.run(&mut Runner::on(Rayon::new()))), plain, "rayon, hint {threads}");
    }
}

/// Every index once, each with a workspace that nobody else uses meanwhile, which grows when it must.
fn runs_each_task_once(mut executor: impl Executor, name: &str) {
    for (tasks, len) in [(0, 8), (1, 64), (2, 16), (1000, 64), (3, 4096), (257, 64)] {
        executor.prepare(len).unwrap();
        let ran: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
        executor.for_each(tasks, &|task, workspace| {
            assert!(workspace.len() >= len);
            workspace[..len].fill(task as u8);
            std::thread::yield_now();
            assert!(workspace[..len].iter().all(|x| *x == task as u8), "{name}: a workspace is shared");
            ran[task].fetch_add(1, Ordering::Relaxed);
        });
        assert!(ran.iter().all(|n| n.load(Ordering::Relaxed) == 1), "{name}: {tasks} tasks");
    }
}

#[test]
fn each_task_runs_once() {
    for threads in [1, 2, 5] {
        runs_each_task_once(Threads::new(threads), "threads");
        runs_each_task_once(Pool::new(threads).unwrap(), "pool");
        runs_each_task_once(Rayon::new(), "rayon");
    }
    assert_eq!(Pool::new(0).unwrap().threads(), 1);
}

/// Defaults run, and so does what nobody prepared: a body that needs no workspace may be called with an empty one.
#[test]
fn executors_as_they_come_run_each_task_once() {
    fn runs(mut executor: impl Executor, name: &str) {
        let ran: Vec<AtomicUsize> = (0..9).map(|_| AtomicUsize::new(0)).collect();
        executor.for_each(9, &|task, _| {
            ran[task].fetch_add(1, Ordering::Relaxed);
        });
        assert!(ran.iter().all(|n| n.load(Ordering::Relaxed) == 1), "{name}: {ran:?}");
    }
    runs(Threads::default(), "threads");
    runs(Pool::new(2).unwrap(), "pool");
    runs(Rayon::default(), "rayon");
    assert_eq!(Problem::new(1).run(&mut Runner::<Threads>::default()), Problem::new(1).run(&mut Runner::new(2)));
}

#[test]
fn a_panic_in_a_task_reaches_the_caller_and_the_pool_goes_on() {
    let mut pool = Pool::new(3).unwrap();
    pool.prepare(8).unwrap();
    for bad in [0, 1, 99] {
        let body = |task: usize, _: &mut [u8]| assert!(task != bad, "task {task} is bad");
        let panic = catch_unwind(AssertUnwindSafe(|| pool.for_each(100, &body))).unwrap_err();
        assert_eq!(panic.downcast_ref::<String>().unwrap(), &format!("task {bad} is bad"));
    }
    runs_each_task_once(pool, "pool after panics");
}

/// When the last of the threads ends, if each takes the next task as soon as it is free; `speeds` in cost per unit of time.
fn makespan(costs: &[u64], speeds: &[f64]) -> f64 {
    let mut free = vec![0.0f64; speeds.len()];
    for &cost in costs {
        let (next, _) = free.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1)).unwrap();
        free[next] += cost as f64 / speeds[next];
    }
    free.into_iter().fold(0.0, f64::max)
}

/// Costs of the attention tasks of a call, in the order in which executors take them.
fn costs(
    (heads_q, heads_kv, dim): (usize, usize, usize),
    threads: usize,
    operation: Operation,
    lengths: &[(usize, usize)],
) -> Vec<u64> {
    let mut capabilities: Capabilities = rotile::capabilities().unwrap();
    capabilities.threads = threads;
    let mut spec = AttentionSpec::attend(heads_q, heads_kv, dim, RotarySpec::none());
    (spec.operation, spec.keys) = (operation, Keys::Rotated);
    let plan = Plan::new(&capabilities, &spec).unwrap();
    // Sizes are all that counts: every head sees the same elements, and every sequence the same cache.
    let tokens = |f: fn(&(usize, usize)) -> usize| lengths.iter().map(f).sum::<usize>();
    let (q_tokens, kv_tokens) = (tokens(|l| l.0), lengths.iter().map(|l| l.1).max().unwrap());
    let q = vec![0.5f32; q_tokens * heads_q * dim];
    let kv = vec![0.5f32; kv_tokens * heads_kv * dim];
    let mut out = vec![0.0f32; q.len()];
    let shape = |tokens, heads| Shape { batch: 1, tokens, heads, dim };
    let (q_shape, kv_shape) = (shape(q_tokens, heads_q), shape(kv_tokens, heads_kv));
    let mut q_at = 0;
    let sequences: Vec<Sequence<'_>> = lengths
        .iter()
        .map(|&(q_len, kv_len)| {
            let mut s = Sequence::new(q_len, kv_len);
            s.q.token = q_at;
            q_at += q_len;
            s
        })
        .collect();
    let q = Tensor::token_major(&q[..], q_shape).unwrap();
    let (k, v) = (Tensor::head_major(&kv[..], kv_shape).unwrap(), Tensor::head_major(&kv[..], kv_shape).unwrap());
    let out = TensorMut::token_major(&mut out[..], q_shape).unwrap();
    let operands = match operation {
        Operation::Attend => Operands::Attend { q, k, v, out, lse: None },
        _ => Operands::AttendCached { q, k_cache: k, v_cache: v, out, lse: None },
    };
    let mut batch = Batch::new(operands, &sequences);
    let mut scratch = vec![0; plan.scratch_len(&sequences)];
    let call = plan.prepare(&mut batch, &mut scratch).unwrap();
    (0..call.tasks(0)).map(|task| call.task_cost(0, task)).collect()
}

#[test]
fn many_threads_stay_busy() {
    let mixed: Vec<(usize, usize)> = [(1, 4096); 8].into_iter().chain([(2048, 2048)]).chain([(1, 1000); 8]).collect();
    let shapes = [
        ("prefill 32/8x128, 512", (32, 8, 128), Operation::Attend, &[(512, 512)][..]),
        ("prefill 32/8x128, 2048", (32, 8, 128), Operation::Attend, &[(2048, 2048)]),
        ("prefill 8/2x128, 2048", (8, 2, 128), Operation::Attend, &[(2048, 2048)]),
        ("decode 32/8x128, 4096", (32, 8, 128), Operation::AttendCached, &[(1, 4096)]),
        ("decode 32/8x128, 32768", (32, 8, 128), Operation::AttendCached, &[(1, 32768)]),
        ("mixed 32/8x128", (32, 8, 128), Operation::AttendCached, &mixed),
    ];
    println!("share of ideal: tasks, threads of one speed, half of them at 0.4");
    for (name, heads, operation, lengths) in shapes {
        for threads in [2, 4, 8, 16, 32, 64] {
            let costs = costs(heads, threads, operation, lengths);
            let total = costs.iter().sum::<u64>() as f64;
            let efficiency = |speeds: &[f64]| total / speeds.iter().sum::<f64>() / makespan(&costs, speeds);
            let equal = efficiency(&vec![1.0; threads]);
            let speeds: Vec<f64> = (0..threads).map(|i| if i % 2 == 0 { 1.0 } else { 0.4 }).collect();
            let unequal = efficiency(&speeds);
            println!("{name:<24} {threads:>3} threads {:>5} tasks  {equal:.2}  {unequal:.2}", costs.len());
            // A task can't be cut without end: four for each thread are what is promised.
            let (floor, unequal_floor) = if costs.len() >= 4 * threads { (0.9, 0.75) } else { (0.0, 0.0) };
            assert!(equal >= floor && unequal >= unequal_floor, "{name}, {threads} threads: {equal:.2}, {unequal:.2}");
            let most = if operation == Operation::Attend { 32 } else { 8 };
            assert!(threads > most || costs.len() >= 4 * threads, "{name}: {} tasks for {threads}", costs.len());
        }
    }
}
