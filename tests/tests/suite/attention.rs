//! Attention over random documents, layouts, masks, head counts, sinks and exchange strategies, with overlap and without, against
//! attention in `f64`.
//!
//! `BURN_CP_CASES` is the number of cases (1,000), `BURN_CP_SEED` the first seed (0): a failure names its seed, and
//! `BURN_CP_SEED=<seed> BURN_CP_CASES=1` runs it alone.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::atomic::{AtomicUsize, Ordering},
};

use burn::{
    backend::{Autodiff, NdArray},
    tensor::{DType, Tensor, TensorData, TensorPrimitive, backend::AutodiffBackend},
};
use burn_cp::{
    attention::{
        AttentionInput, AttentionOptions, ContextParallelBackend, InnerAttention, attend_with_lse,
        resolve,
    },
    batch::SequenceBatch,
    layout::{AlignedDocuments, Documents, LayoutPolicy},
    plan::{AttentionPlan, CostShape, ExchangeStrategy, MaskKind, PlanError},
    sharder::{ContextParallelConfig, Coordinates, CpStep},
};
use burn_cp_tests::{
    Attention, Form, Problem, Random, TestBackend, attention_in_tensor_ops,
    attention_with_sinks_in_f64, backward, device, floats, head_dim, on_groups, random_documents,
    random_exchange, random_layout, random_marks, random_mask, random_placement, relative_error,
    sharder, span_tokens, to_bits, unmarked, visible,
};

#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) documents: Documents,
    /// How the batch is told of its documents.
    pub(crate) form: Form,
    /// Where its tokens are moved to, if anywhere.
    pub(crate) placed: Option<AlignedDocuments>,
    pub(crate) layout: LayoutPolicy,
    pub(crate) exchange: ExchangeStrategy,
    pub(crate) overlap: bool,
    pub(crate) world_size: usize,
    pub(crate) options: AttentionOptions,
    pub(crate) problem: Problem,
    pub(crate) sinks: Option<Vec<f64>>,
}

impl Case {
    fn random(random: &mut Random) -> Self {
        let world_size = random.int(1..=8);
        let batch = random.int(1..=3);
        let documents = random_documents(random, batch);
        let documents = random_marks(random, &documents);
        let mask = random_mask(random);
        let mut layout = random_layout(random, world_size, documents.seq_len());
        let mut form = Form::random(random, &documents);
        let placed = random.once_in(3).then(|| {
            let (placed, for_placed) = random_placement(random, &documents, world_size);
            layout = for_placed;
            form = Form::Table;
            placed
        });
        let by_document = matches!(mask, MaskKind::Prefix { .. } | MaskKind::PerDocument { .. });
        if by_document && !form.keeps_table() {
            form = Form::Table;
        }
        let (exchange, overlap) = random_exchange(random);
        let scale = random.once_in(4).then_some(0.5);
        // Heads that can be dealt out, where they must be.
        let (num_kv_heads, of_a_group) = match exchange {
            ExchangeStrategy::HeadAllToAll => (world_size, random.int(1..=2)),
            ExchangeStrategy::Auto => (world_size.min(4), random.int(1..=2)),
            _ => (random.int(1..=2), random.one_of(&[1, 2, 4])),
        };
        let problem = Problem {
            batch,
            num_heads: num_kv_heads * of_a_group,
            num_kv_heads,
            tokens: documents.seq_len(),
            head_dim: head_dim(random.one_of(&[1, 4, 6, 8])),
            v_head_dim: head_dim(random.one_of(&[1, 3, 4, 8])),
            scale,
        };
        let sinks = random.once_in(3).then(|| random.floats(problem.num_heads));
        let mut case = Self {
            form,
            placed,
            layout,
            exchange,
            overlap,
            options: AttentionOptions {
                mask,
                scale,
                ..Default::default()
            },
            documents,
            world_size,
            problem,
            sinks,
        };
        if exchange == ExchangeStrategy::LeftHalo && case.strategy().is_err() {
            case.exchange = ExchangeStrategy::NeededOnly;
        }
        case
    }

    /// The strategy that the case takes, from its plan alone.
    pub(crate) fn strategy(&self) -> Result<ExchangeStrategy, PlanError> {
        let documents = match &self.placed {
            Some(placed) => &placed.documents,
            None => &self.documents,
        };
        let layout = self.layout.layout(documents, self.world_size).unwrap();
        let documents = documents.padded_to(layout.seq_len()).unwrap();
        let plan = AttentionPlan::new(documents.into(), layout.into(), self.options.mask).unwrap();
        let shape = CostShape {
            num_heads: self.problem.num_heads,
            num_kv_heads: self.problem.num_kv_heads,
            head_dim: self.problem.head_dim,
            v_head_dim: self.problem.v_head_dim,
            bytes_per_element: 4,
        };
        resolve(&plan, self.exchange, self.overlap, &shape)
    }

    pub(crate) fn inputs(&self, random: &mut Random) -> [Vec<f64>; 4] {
        self.problem
            .shapes()
            .map(|shape| random.floats(shape.iter().product()))
    }

    fn config(&self) -> ContextParallelConfig {
        let (layout, exchange, overlap) = (self.layout.clone(), self.exchange, self.overlap);
        ContextParallelConfig {
            layout,
            exchange,
            overlap,
            // Half of the cases, each of which stays the same.
            keep_keys: self.documents.seq_len() % 2 == 1,
            // More than a device has leaves one.
            sm_margin: [0, 16, 1000][self.documents.seq_len() % 3],
            ..ContextParallelConfig::default()
        }
    }

    fn batch<B: ContextParallelBackend>(&self) -> SequenceBatch<B> {
        let shape = [self.problem.batch, self.problem.tokens];
        let ids = TensorData::new(vec![1_i64; shape[0] * shape[1]], shape);
        let batch = SequenceBatch::from_ids(ids);
        let documents = &self.documents;
        match &self.placed {
            // Spans in the coordinates of the batch, or of the placed rows.
            Some(placed)
                if self.options.mask == MaskKind::CAUSAL_WITH_SPANS
                    && shape[1].is_multiple_of(2) =>
            {
                let placed = AlignedDocuments {
                    documents: unmarked(&placed.documents),
                    placement: placed.placement.clone(),
                };
                batch
                    .with_aligned_documents(placed)
                    .with_spans(span_tokens(documents))
            }
            Some(placed) => batch.with_aligned_documents(placed.clone()),
            None => self.form.tell_marked(batch, documents),
        }
    }

    /// This rank's part of `[batch, heads, seq, ..]`. With a placement, rows must stand next to tokens.
    fn cut<B: ContextParallelBackend, const D: usize>(
        &self,
        step: &CpStep<B>,
        whole: Tensor<B, D>,
        fill: f64,
    ) -> Tensor<B, D> {
        match &self.placed {
            Some(_) => step
                .shard_tokens(whole.swap_dims(0, 1), 2, Coordinates::Input, Some(fill))
                .swap_dims(0, 1),
            None => step.shard_tokens(whole, 2, Coordinates::Input, Some(fill)),
        }
    }

    /// The inverse of [`Self::cut`].
    fn whole<B: ContextParallelBackend, const D: usize>(
        &self,
        step: &CpStep<B>,
        local: Tensor<B, D>,
        fill: f64,
    ) -> Tensor<B, D> {
        match &self.placed {
            Some(_) => step
                .gather_tokens(local.swap_dims(0, 1), 2, Coordinates::Input, Some(fill))
                .swap_dims(0, 1),
            None => step.gather_tokens(local, 2, Coordinates::Input, None),
        }
    }
}

/// What one rank has: `out` and `lse` gathered to whole rows, and its own part of the gradients at the places of its tokens.
struct RankResult {
    out: Vec<f64>,
    lse: Vec<f64>,
    gradients: [Vec<f64>; 3],
    dsinks: Vec<f64>,
    all_padding: bool,
    received: usize,
}

/// Runs a case on all its ranks, forward and backward through the step, and once more below autodiff for `lse`.
pub(crate) fn run<B>(case: &Case, inputs: &[Vec<f64>; 4], dtype: DType) -> (Attention, usize, usize)
where
    B: AutodiffBackend + ContextParallelBackend,
    B::InnerBackend: InnerAttention + ContextParallelBackend,
{
    let results = on_groups(&[("cp", case.world_size)], |groups| {
        let device = device();
        let cp = sharder(&groups, case.config());
        let shapes = case.problem.shapes();
        let [q, k, v, dout]: [Tensor<B, 4>; 4] = std::array::from_fn(|i| {
            Tensor::from_data(
                TensorData::new(inputs[i].clone(), shapes[i]),
                (&device, dtype),
            )
        });
        // The whole tensors are this rank's leaves: the gradients of its tokens land where the tokens came from.
        let leaves = [q, k, v].map(Tensor::require_grad);
        let step = cp.shard(case.batch::<B>(), &device).unwrap();
        let [q, k, v] = leaves.clone().map(|leaf| case.cut(&step, leaf, 7.0));
        let sinks = case.sinks.as_ref().map(|values| {
            let values = TensorData::new(values.clone(), [values.len()]);
            Tensor::<B, 1>::from_data(values, (&device, dtype)).require_grad()
        });
        let qkv = (q.clone(), k.clone(), v.clone());
        let out = match &sinks {
            None => step.attention(qkv.0, qkv.1, qkv.2, &case.options),
            Some(sinks) => {
                step.attention_with_sinks(qkv.0, qkv.1, qkv.2, sinks.clone(), &case.options)
            }
        };
        let loss = (out.clone() * case.cut(&step, dout, 3.0)).sum();
        let grads = backward(&loss, &groups.world().unwrap());

        let inner = cp.shard(case.batch::<B::InnerBackend>(), &device).unwrap();
        let [q, k, v] = [q, k, v].map(|tensor| tensor.inner().into_primitive().tensor());
        let inner_sinks = (sinks.clone()).map(|sinks| sinks.inner().into_primitive().tensor());
        let input = AttentionInput::new(q, k, v).with_sinks(inner_sinks);
        let (again, lse) =
            attend_with_lse::<B::InnerBackend>(input, &inner.attention_call(&case.options));
        let wrap = |primitive| TensorPrimitive::Float(primitive);
        let again = Tensor::<B::InnerBackend, 4>::from_primitive(wrap(again));
        assert_eq!(
            to_bits(&again),
            to_bits(&out.clone().inner()),
            "the forward pass with and without autodiff"
        );
        let lse = Tensor::<B::InnerBackend, 3>::from_primitive(wrap(lse));
        let plan = step.plan(case.options.mask).unwrap();
        let rank = plan.rank(step.group().rank());
        RankResult {
            out: floats(&case.whole(&step, out.detach(), 0.0)),
            lse: floats(&case.whole(&inner, lse, f64::NEG_INFINITY)),
            gradients: leaves.map(|leaf| floats(&leaf.grad(&grads).unwrap())),
            dsinks: sinks.map_or_else(Vec::new, |sinks| floats(&sinks.grad(&grads).unwrap())),
            all_padding: rank.tokens == 0,
            received: rank.kv_tokens_received,
        }
    });
    together(&results)
}

/// What all ranks have, how many are all padding, and the tokens that they received.
fn together(results: &[RankResult]) -> (Attention, usize, usize) {
    for result in &results[1..] {
        assert!(
            results[0].out == result.out,
            "every rank gathers the same output"
        );
    }
    let sum = |of: &dyn Fn(&RankResult) -> &Vec<f64>| {
        let mut sum = of(&results[0]).clone();
        for result in &results[1..] {
            sum.iter_mut()
                .zip(of(result))
                .for_each(|(sum, part)| *sum += part);
        }
        sum
    };
    let num_padding_ranks = results.iter().filter(|result| result.all_padding).count();
    let received = results.iter().map(|result| result.received).sum();
    let (out, lse) = (results[0].out.clone(), results[0].lse.clone());
    (
        Attention {
            out,
            lse,
            dq: sum(&|result| &result.gradients[0]),
            dk: sum(&|result| &result.gradients[1]),
            dv: sum(&|result| &result.gradients[2]),
            dsinks: sum(&|result| &result.dsinks),
        },
        num_padding_ranks,
        received,
    )
}

/// One result of a case: as we have it, as the textbook has it, and in `f64`.
struct Measured {
    what: &'static str,
    got: Vec<f64>,
    textbook: Vec<f64>,
    want: Vec<f64>,
}

impl Measured {
    fn append(&mut self, more: Self) {
        self.got.extend(more.got);
        self.textbook.extend(more.textbook);
        self.want.extend(more.want);
    }

    /// Normwise error, and what is allowed: twice that of textbook attention with the same dtype, inputs and backend, plus
    /// four units in the last place.
    fn errors(&self, dtype: DType) -> (f64, f64) {
        let epsilon = if dtype == DType::F64 {
            f64::EPSILON
        } else {
            f32::EPSILON.into()
        };
        let textbook = relative_error(&self.textbook, &self.want);
        (
            relative_error(&self.got, &self.want),
            2.0 * textbook + 4.0 * epsilon,
        )
    }
}

/// Draws inputs, runs the case, and checks what must hold exactly.
fn measure<B>(case: &Case, random: &mut Random, dtype: DType) -> ([Measured; 6], usize, usize)
where
    B: AutodiffBackend + ContextParallelBackend,
    B::InnerBackend: InnerAttention + ContextParallelBackend,
{
    let inputs = case.inputs(random);
    let (got, num_padding_ranks, received) = run::<B>(case, &inputs, dtype);
    let visible = visible(&case.documents, case.options.mask);
    let slices: [&[f64]; 4] = std::array::from_fn(|i| inputs[i].as_slice());
    let sinks = case.sinks.as_deref();
    let want = attention_with_sinks_in_f64(&case.problem, slices, sinks, &visible);
    let textbook = attention_in_tensor_ops::<B>(&case.problem, slices, sinks, &visible, dtype);
    let blind = |lse: &[f64]| {
        lse.iter()
            .map(|x| *x == f64::NEG_INFINITY)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        blind(&got.lse),
        blind(&want.lse),
        "lse is -inf exactly where no key is seen"
    );
    let [q_shape, k_shape, v_shape, out_shape] = case.problem.shapes();
    for (what, values, shape) in [
        ("out", &got.out, out_shape),
        ("dq", &got.dq, q_shape),
        ("dk", &got.dk, k_shape),
        ("dv", &got.dv, v_shape),
    ] {
        let zero = is_zero_at_padding(values, shape, &case.documents);
        assert!(zero, "{what}: not 0 at padding");
    }
    let seen = |lse: Vec<f64>| lse.into_iter().filter(|x| x.is_finite()).collect();
    let results = [
        ("out", got.out, textbook.out, want.out),
        ("lse", seen(got.lse), seen(textbook.lse), seen(want.lse)),
        ("dq", got.dq, textbook.dq, want.dq),
        ("dk", got.dk, textbook.dk, want.dk),
        ("dv", got.dv, textbook.dv, want.dv),
        ("dsinks", got.dsinks, textbook.dsinks, want.dsinks),
    ];
    let results = results.map(|(what, got, textbook, want)| Measured {
        what,
        got,
        textbook,
        want,
    });
    (results, num_padding_ranks, received)
}

/// Checks every result of a case by the rule of [`Measured::errors`].
///
/// The rule compares norms, which says little about a handful of values, where either side may be lucky. A case that misses it
/// is therefore judged over sixteen draws of its inputs together, by the same rule.
pub(crate) fn check<B>(case: &Case, random: &mut Random, dtype: DType) -> (usize, usize)
where
    B: AutodiffBackend + ContextParallelBackend,
    B::InnerBackend: InnerAttention + ContextParallelBackend,
{
    let (mut results, num_padding_ranks, received) = measure::<B>(case, random, dtype);
    let misses = |results: &[Measured]| {
        let missed = results
            .iter()
            .map(|result| (result.what, result.errors(dtype)));
        missed
            .filter(|(_, (error, allowed))| error > allowed)
            .collect::<Vec<_>>()
    };
    if !misses(&results).is_empty() {
        for _ in 1..16 {
            let (more, ..) = measure::<B>(case, random, dtype);
            results
                .iter_mut()
                .zip(more)
                .for_each(|(result, more)| result.append(more));
        }
    }
    let missed = misses(&results);
    assert!(missed.is_empty(), "(result, (error, allowed)): {missed:?}");
    (num_padding_ranks, received)
}

/// Whether a tensor `[batch, heads, tokens, width]` is exactly 0 at every token that no document counts.
fn is_zero_at_padding(
    values: &[f64],
    [_, heads, tokens, width]: [usize; 4],
    documents: &Documents,
) -> bool {
    values
        .chunks(heads * tokens * width)
        .enumerate()
        .all(|(row, values)| {
            let padding = documents.padding_mask(row);
            let mut vectors = values.chunks(width).enumerate();
            vectors
                .all(|(i, vector)| !padding[i % tokens] || vector.iter().all(|value| *value == 0.0))
        })
}

fn number_from(variable: &str, default: usize) -> usize {
    match std::env::var(variable) {
        Ok(value) => value
            .parse()
            .unwrap_or_else(|_| panic!("{variable}: expected a number, got {value:?}")),
        Err(_) => default,
    }
}

/// Most cases in `f32` on the backend under test, every eighth in `f64` on NdArray.
#[test]
fn attention_is_as_accurate_as_the_textbook_on_random_cases() {
    let (first, num_cases) = (
        number_from("BURN_CP_SEED", 0),
        number_from("BURN_CP_CASES", 1000),
    );
    let (next, padding, moved) = (
        AtomicUsize::new(0),
        AtomicUsize::new(0),
        AtomicUsize::new(0),
    );
    let worker = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= num_cases {
                break;
            }
            let seed = first + index;
            let mut random = Random::new(seed as u64);
            let case = Case::random(&mut random);
            let result = catch_unwind(AssertUnwindSafe(|| match seed % 8 {
                7 => check::<Autodiff<NdArray<f64>>>(&case, &mut random, DType::F64),
                _ => check::<Autodiff<TestBackend>>(&case, &mut random, DType::F32),
            }));
            match result {
                Ok((num_padding_ranks, received)) => {
                    padding.fetch_add(usize::from(num_padding_ranks > 0), Ordering::Relaxed);
                    moved.fetch_add(usize::from(received > 0), Ordering::Relaxed);
                }
                Err(panic) => {
                    next.store(num_cases, Ordering::Relaxed);
                    eprintln!("BURN_CP_SEED={seed} BURN_CP_CASES=1 fails: {case:?}");
                    resume_unwind(panic);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(worker);
        }
    });
    if num_cases >= 500 {
        let (padding, moved) = (padding.into_inner(), moved.into_inner());
        assert!(
            padding > num_cases / 10,
            "too few cases ({padding}) have a rank that is all padding"
        );
        assert!(
            moved > num_cases / 3,
            "too few cases ({moved}) exchange anything"
        );
    }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
#[test]
fn a_size_of_heads_that_the_device_lacks_is_refused_before_anything_travels() {
    on_groups(&[("cp", 2)], |groups| {
        let ids = TensorData::zeros::<i64, _>([1, 8]);
        let batch = SequenceBatch::<TestBackend>::from_ids(ids);
        let step = sharder(&groups, ContextParallelConfig::default())
            .shard(batch, &device())
            .unwrap();
        let size = [1, 1, step.local_len(), 4];
        let x = Tensor::<TestBackend, 4>::zeros(size, &device());
        let attend = || step.attention(x.clone(), x.clone(), x, &AttentionOptions::causal());
        let message = crate::verbs::panic_of(|| drop(attend()));
        assert!(message.starts_with("attention: head_dim"), "{message}");
        step.group().barrier().unwrap();
    });
}
