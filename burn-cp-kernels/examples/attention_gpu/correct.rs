//! Results against the f64 reference, and bits.

use std::sync::{
    OnceLock,
    atomic::{AtomicUsize, Ordering},
};

use burn::tensor::{
    DType,
    backend::Backend,
    ops::{FloatTensor, FloatTensorOps},
};
use burn_cp_kernels::{
    AttentionBackend, AttentionBackwardInput, AttentionInput, AttentionOptions, Dropout, Routine,
    Segments,
};

use crate::{
    Device, ROUTINES,
    cases::{Case, Results, causal, documents, lists, long_lists, read},
    parts::parted,
    wanted,
};

const EPS: [(DType, f64); 3] = [
    (DType::BF16, 0.007_812_5),
    (DType::F16, 0.000_976_562_5),
    (DType::F32, f32::EPSILON as f64),
];

/// Relative errors by result; infinite where one is not finite and the other is.
fn errors(actual: &Results, expected: &Results) -> Vec<(&'static str, f64)> {
    let pairs = actual.all.iter().zip(&expected.all);
    pairs
        .map(|((name, actual), (_, expected))| {
            let (mut error, mut size) = (0.0, 0.0);
            for (a, e) in actual.iter().zip(expected) {
                if e.is_finite() && a.is_finite() {
                    error += (a - e).powi(2);
                    size += e * e;
                } else if a != e {
                    error = f64::INFINITY;
                }
            }
            (*name, (error / f64::max(size, 1e-300)).sqrt())
        })
        .collect()
}

/// A case for a routine.
struct Job {
    name: String,
    case: Case,
    dtype: (DType, f64),
    routine: Routine,
}

/// What a case's results are judged by, made on the host.
struct Standard {
    expected: Results,
    /// Largest relative errors: 4 eps, in f32 plus twice those of textbook attention in f32. `lse` is f32 in every dtype, and judged as
    /// such.
    bounds: Vec<f64>,
}

impl Job {
    fn standard(&self) -> Standard {
        let expected = self.case.expected();
        let plain = self.case.plain();
        let options = &self.case.options;
        let textbook = if options.softcap.is_none() && options.dropout.is_none() {
            errors(&plain.textbook(), &expected)
        } else {
            errors(&plain.textbook(), &plain.expected())
        };
        let bounds = textbook.iter().map(|(name, error)| {
            if self.dtype.0 == DType::F32 || *name == "lse" {
                4.0 * f64::from(f32::EPSILON) + 2.0 * error
            } else {
                4.0 * self.dtype.1
            }
        });
        let bounds = bounds.collect();
        Standard { expected, bounds }
    }

    /// Runs the case; whether a result is wrong.
    fn judge(&mut self, standard: &Standard) -> u32 {
        let routine = self.routine;
        self.case.options = self.case.options.clone().with_routine(routine);
        let ours = errors(&self.case.run(true), &standard.expected);
        let wrong = ours
            .iter()
            .zip(&standard.bounds)
            .filter(|((_, error), bound)| error.is_nan() || *error > **bound)
            .count();
        let list: Vec<String> = ours
            .iter()
            .map(|(name, error)| format!("{name} {error:.1e}"))
            .collect();
        let mark = if wrong > 0 { "  WRONG" } else { "" };
        let (name, dtype) = (&self.name, self.dtype.0);
        println!("{routine} {dtype:?} {name}: {}{mark}", list.join(", "));
        wrong as u32
    }
}

/// Runs the jobs whose routine is asked for. Their standards are made on all cores of the host, which takes longer than the runs.
fn judge_all(mut jobs: Vec<Job>) -> u32 {
    jobs.retain(|job| wanted(job.routine));
    let next = AtomicUsize::new(0);
    let standards: Vec<OnceLock<Standard>> = jobs.iter().map(|_| OnceLock::new()).collect();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                while let Some(index) =
                    Some(next.fetch_add(1, Ordering::Relaxed)).filter(|index| *index < jobs.len())
                {
                    standards[index].get_or_init(|| jobs[index].standard());
                }
            });
        }
    });
    jobs.iter_mut()
        .zip(standards)
        .filter_map(|(job, standard)| Some(job.judge(&standard.into_inner()?)))
        .sum()
}

fn options() -> AttentionOptions {
    AttentionOptions::new()
}

/// Every routine on every list of segments.
pub(crate) fn check() -> u32 {
    let mut jobs = Vec::new();
    for dtype in EPS {
        for (name, segments) in lists() {
            let new = |heads, dims| Case::new(segments.clone(), heads, dims, options(), dtype.0);
            let mut add = |routine, heads: (usize, usize), dims: (usize, usize)| {
                jobs.push(Job {
                    name: format!("{name}, heads {heads:?}, dims {dims:?}"),
                    case: new(heads, dims),
                    dtype,
                    routine,
                });
            };
            if dtype.0 != DType::F32 {
                add(Routine::Hopper, (4, 2), (128, 128));
                add(Routine::Hopper, (4, 1), (64, 64));
                add(Routine::Hopper, (2, 2), (64, 64));
                add(Routine::TensorCore, (4, 2), (128, 128));
                add(Routine::TensorCore, (2, 2), (64, 64));
                add(Routine::TensorCore, (3, 3), (40, 72));
            }
            if dtype.0 == DType::BF16 {
                add(Routine::Hopper, (2, 1), (192, 128));
                add(Routine::Hopper, (2, 1), (256, 256));
                add(Routine::Hopper, (3, 3), (72, 40));
                add(Routine::TensorCore, (2, 1), (192, 128));
                add(Routine::TensorCore, (2, 1), (256, 256));
                add(Routine::TensorCore, (2, 1), (120, 128));
                add(Routine::TensorCore, (4, 1), (96, 32));
            }
            add(Routine::Portable, (2, 1), (128, 128));
            add(Routine::Portable, (3, 3), (40, 72));
        }
        jobs.extend(with_options(dtype));
        jobs.extend(merged(dtype));
        if dtype.0 == DType::F32 {
            continue;
        }
        for (name, segments) in long_lists() {
            for (routine, dims) in [
                (Routine::TensorCore, (128, 128)),
                (Routine::TensorCore, (120, 128)),
                (Routine::Hopper, (128, 128)),
            ] {
                jobs.push(Job {
                    name: format!("{name}, heads (4, 2), dims {dims:?}"),
                    case: Case::new(segments.clone(), (4, 2), dims, options(), dtype.0),
                    dtype,
                    routine,
                });
            }
        }
    }
    judge_all(jobs)
}

/// Softcaps, sinks and dropout.
fn with_options(dtype: (DType, f64)) -> Vec<Job> {
    let segments = lists().swap_remove(2).1;
    let job = |name: &str, options, dims, routine| Job {
        name: name.to_owned(),
        case: Case::new(segments.clone(), (4, 2), dims, options, dtype.0).with_sinks(),
        dtype,
        routine,
    };
    let capped = || options().with_softcap(2.0);
    let dropped = capped().with_dropout(Dropout::new(0.2, 9));
    let name = "softcap, sinks, dropout";
    let mut jobs = vec![job(name, dropped, (96, 256), Routine::Portable)];
    if dtype.0 != DType::F32 {
        for routine in [Routine::Hopper, Routine::TensorCore] {
            jobs.push(job("softcap, sinks", capped(), (128, 128), routine));
            // Which hardly changes a score.
            let wide = options().with_softcap(1e6);
            jobs.push(job("wide softcap, sinks", wide, (128, 128), routine));
        }
    }
    jobs
}

/// Two results over disjoint keys made one, in their own dtype and in f32, by vectors of several lengths; and the gradients of both parts.
fn merged(dtype: (DType, f64)) -> Vec<Job> {
    let (whole, parts) = parted();
    let routines = ROUTINES
        .into_iter()
        .filter(|routine| dtype.0 != DType::F32 || *routine == Routine::Portable);
    let merged_dtypes = match dtype.0 {
        DType::F32 => vec![DType::F32],
        own => vec![own, DType::F32],
    };
    let mut jobs = Vec::new();
    for routine in routines {
        for merged in merged_dtypes.clone() {
            for dims in [(128, 128), (72, 40)] {
                let case = Case::new(whole.clone(), (4, 2), dims, options(), dtype.0);
                jobs.push(Job {
                    name: format!("parts, merged in {merged:?}, dims {dims:?}"),
                    case: case.in_parts(parts.clone(), merged),
                    dtype,
                    routine,
                });
            }
        }
    }
    jobs
}

/// Few and small cases of every kernel that `time` measures, for tools that watch each access of memory.
pub(crate) fn small() -> u32 {
    let bf16 = EPS[0];
    let mut jobs = Vec::new();
    for (name, segments) in lists() {
        for routine in ROUTINES {
            for dims in [(64, 64), (128, 128)] {
                jobs.push(Job {
                    name: format!("{name}, dims {dims:?}"),
                    case: Case::new(segments.clone(), (2, 1), dims, options(), bf16.0),
                    dtype: bf16,
                    routine,
                });
            }
        }
    }
    for (name, segments) in long_lists() {
        jobs.push(Job {
            name: format!("{name}, dims (128, 128)"),
            case: Case::new(segments, (2, 1), (128, 128), options(), bf16.0),
            dtype: bf16,
            routine: Routine::TensorCore,
        });
    }
    for (routine, dims) in [
        (Routine::Hopper, (192, 128)),
        (Routine::Hopper, (256, 256)),
        (Routine::TensorCore, (192, 128)),
        (Routine::TensorCore, (72, 40)),
        (Routine::Portable, (40, 72)),
    ] {
        let options = options().with_softcap(2.0);
        jobs.push(Job {
            name: format!("softcap, sinks, dims {dims:?}"),
            case: Case::new(lists().swap_remove(2).1, (2, 1), dims, options, bf16.0).with_sinks(),
            dtype: bf16,
            routine,
        });
    }
    jobs.extend(merged(bf16));
    judge_all(jobs)
}

/// Repeats, and documents that are cut.
pub(crate) fn bits() -> u32 {
    let mut wrong = 0;
    for routine in ROUTINES.into_iter().filter(|routine| wanted(*routine)) {
        let forced = options().with_routine(routine);
        // Which the portable routine has no kernel of its own for.
        let long = match routine {
            Routine::Portable => Vec::new(),
            _ => long_lists(),
        };
        for (name, segments) in lists().into_iter().chain(long) {
            let case = Case::new(segments, (4, 2), (128, 128), forced.clone(), DType::BF16);
            let first = case.run(true);
            let same = (0..20).all(|_| case.run(true).all == first.all);
            println!(
                "{routine} {name}: 20 repeats {}",
                if same { "equal" } else { "WRONG" }
            );
            wrong += u32::from(!same);
            let same = case.poisoned().run(true).all == first.all;
            println!(
                "{routine} {name}: NaN in other rows {}",
                if same { "changes nothing" } else { "WRONG" }
            );
            wrong += u32::from(!same);
        }
        let tokens = 1000;
        let whole = Case::new(documents(&[tokens]), (2, 2), (64, 64), forced, DType::BF16);
        let mut cut = Case::new(
            documents(&[tokens]),
            (2, 2),
            (64, 64),
            whole.options.clone(),
            DType::BF16,
        );
        let cuts = [0, 1, 100, 333, 640, 641, 937, tokens];
        let pieces = cuts
            .windows(2)
            .map(|cut| causal(cut[0]..cut[1], 0..cut[1], 0));
        cut.segments = Segments::new(pieces.collect(), (1, tokens), (1, tokens)).expect("pieces");
        let same = whole.run(false).all == cut.run(false).all;
        println!(
            "{routine} cuts of a document: {}",
            if same { "equal" } else { "WRONG" }
        );
        wrong += u32::from(!same);
    }
    wrong
}

/// Keys behind 2^31 elements of their buffer.
pub(crate) fn far() -> u32 {
    let (dim, near) = (64, 300);
    let tokens = (1usize << 31) / dim + 4096;
    let device = Default::default();
    let segments = |tokens: usize| {
        let list = vec![causal(0..near, tokens - near..tokens, 0)];
        Segments::new(list, (1, near), (1, tokens)).expect("legal segments")
    };
    let random = |seed: u64, tokens: usize| -> FloatTensor<Device> {
        Device::seed(&device, seed);
        let shape = [1, 1, tokens, dim].into();
        let range = burn::tensor::Distribution::Uniform(-1.0, 1.0);
        <Device as FloatTensorOps<Device>>::float_random(
            shape,
            range,
            &device,
            burn::tensor::FloatDType::BF16,
        )
    };
    let last = |tensor: FloatTensor<Device>, tokens: usize| {
        let from = |start: usize, end: usize| burn::tensor::Slice::from(start..end);
        let slices = [
            from(0, 1),
            from(0, 1),
            from(tokens - near, tokens),
            from(0, dim),
        ];
        <Device as FloatTensorOps<Device>>::float_slice(tensor, &slices)
    };
    let mut wrong = 0;
    let (q, dout) = (random(1, near), random(2, near));
    let (k, v) = (random(3, tokens), random(4, tokens));
    let (k_near, v_near) = (last(k.clone(), tokens), last(v.clone(), tokens));
    for routine in ROUTINES.into_iter().filter(|routine| wanted(*routine)) {
        let options = options().with_routine(routine);
        let run = |k: &FloatTensor<Device>, v: &FloatTensor<Device>, tokens: usize| {
            let segments = segments(tokens);
            let input = AttentionInput::new(q.clone(), k.clone(), v.clone());
            let output = Device::attention_forward(input, &segments, &options);
            let (out, lse) = (output.out, output.lse);
            let input = AttentionBackwardInput::new(
                q.clone(),
                k.clone(),
                v.clone(),
                out.clone(),
                lse.clone(),
                dout.clone(),
            );
            let grads = Device::attention_backward(input, &segments, &options);
            let (dk, dv) = (last(grads.dk, tokens), last(grads.dv, tokens));
            [out, lse, grads.dq, dk, dv].map(read)
        };
        let (far, near) = (run(&k, &v, tokens), run(&k_near, &v_near, near));
        let size = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
        let error = far.iter().zip(&near).map(|(far, near)| {
            let difference: Vec<f64> = far.iter().zip(near).map(|(a, b)| a - b).collect();
            size(&difference) / size(near)
        });
        let error = error.fold(0.0, f64::max);
        // Sums over queries may be cut elsewhere, so rounding differs.
        let right = error < 0.01;
        let verdict = if right { "right" } else { "WRONG" };
        println!("{routine}: keys behind 2^31 elements {verdict} ({error:.1e})");
        wrong += u32::from(!right);
    }
    wrong
}
