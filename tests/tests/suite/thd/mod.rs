//! Packed batches in streams over several ranks: what each rank holds, the token verbs over chunks, and refusals.

mod packed;
mod training;

use burn::{
    backend::{Autodiff, NdArray},
    tensor::{DType, Tensor},
};
use burn_cp::{
    comm::{CommError, FailureCause},
    launch::LaunchError,
    layout::{LayoutError, LayoutPolicy},
    plan::{ExchangeStrategy, PlanError},
    sharder::{
        ContextParallelConfig, Coordinates, MediaKind, StepError, ThdConfig, ThdError, ThdSharder,
    },
};
use burn_cp_tests::{
    DEADLINE, Host, Random, TestBackend, backward, device, ints, on_groups, sharder, with_deadline,
};

use crate::verbs::panic_of;
use packed::Packed;

pub(crate) const IMAGE: i64 = 62;
pub(crate) const VIDEO: i64 = 63;

pub(crate) fn config() -> ContextParallelConfig {
    ContextParallelConfig {
        layout: LayoutPolicy::DualChunkSwap,
        ..ContextParallelConfig::default()
    }
}

pub(crate) fn in_chunks(num_chunks: usize) -> ThdConfig {
    ThdConfig {
        num_chunks,
        image_token_id: Some(IMAGE),
        video_token_id: Some(VIDEO),
    }
}

/// Chunks, ranks, and a batch for them.
fn cases() -> impl Iterator<Item = (Random, Packed, usize, usize)> {
    (0..24).map(|seed| {
        let mut random = Random::new(7000 + seed);
        let num_chunks = random.int(1..=3);
        let world_size = random.int(1..=5);
        let rows = num_chunks * random.int(1..=2);
        let packed = Packed::random(&mut random, rows, 2 * world_size);
        (random, packed, num_chunks, world_size)
    })
}

/// Tokens of a chunk's stream that a rank must own, document by document.
fn owned(lengths: &[[usize; 2]], world_size: usize, rank: usize) -> Vec<usize> {
    let (mut start, mut tokens) = (0, Vec::new());
    for [_, padded] in lengths {
        let part = padded / (2 * world_size);
        let back = 2 * world_size - 1 - rank;
        tokens.extend(start + rank * part..start + (rank + 1) * part);
        tokens.extend(start + back * part..start + (back + 1) * part);
        start += padded;
    }
    if world_size == 1 {
        (0..start).collect()
    } else {
        tokens
    }
}

#[test]
fn a_rank_holds_of_every_chunk_the_two_parts_of_each_document_and_the_features_of_their_tokens() {
    type B = TestBackend;
    for (_, packed, num_chunks, world_size) in cases() {
        on_groups(&[("cp", world_size)], |groups| {
            let cp = ThdSharder::new(sharder(&groups, config()), in_chunks(num_chunks)).unwrap();
            let step = cp
                .shard(packed.batch::<B>(), packed.slots(num_chunks), &device())
                .unwrap();
            let rank = cp.context().group().rank();
            assert_eq!(step.num_chunks(), num_chunks);
            assert_eq!(step.stream_len(), packed.ids.len() / num_chunks);
            assert_eq!(step.local_len(), step.stream_len() / world_size);
            let rows = packed.size[0] / num_chunks;
            for (chunk, of_chunk) in step.steps().iter().enumerate() {
                let start = packed.stream(num_chunks, chunk).start;
                let lengths = packed.lengths[chunk * rows..(chunk + 1) * rows].concat();
                let tokens = owned(&lengths, world_size, rank);
                let at = |values: &[i64], from: usize| -> Vec<i64> {
                    tokens
                        .iter()
                        .map(|token| values[from + start + token])
                        .collect()
                };
                assert_eq!(ints(&of_chunk.ids().unwrap()), at(&packed.ids, 0));
                assert_eq!(of_chunk.labels().unwrap(), at(&packed.labels, 0));
                let axes = (0..3).flat_map(|axis| at(&packed.positions, axis * packed.ids.len()));
                assert_eq!(of_chunk.positions().dims(), [3, 1, tokens.len()]);
                assert_eq!(ints(&of_chunk.positions()), axes.collect::<Vec<_>>());
                let features = |placeholder| -> Vec<usize> {
                    let waiting = tokens
                        .iter()
                        .filter(|t| packed.ids[start + **t] == placeholder);
                    waiting
                        .map(|token| packed.count(start..start + token, placeholder))
                        .collect()
                };
                let rows = |kind| step.media_rows(chunk, kind);
                assert_eq!(rows(MediaKind::Image), features(IMAGE));
                assert_eq!(rows(MediaKind::Video), features(VIDEO));
                let waits = step.media_mask(chunk, MediaKind::Image).unwrap().waits();
                let all = packed.ids[packed.stream(num_chunks, chunk)].iter();
                assert!(all.map(|id| *id == IMAGE).eq(waits.iter().copied()));
            }
        });
    }
}

#[test]
fn gathered_shards_of_chunks_are_the_whole_and_gradients_go_back_to_their_tokens() {
    type B = Autodiff<NdArray<f64>>;
    for (mut random, packed, num_chunks, world_size) in cases() {
        let ([rows, seq], len) = (packed.size, packed.ids.len());
        let whole = Host {
            shape: [rows, seq, 2],
            values: random.small_ints(2 * len),
        };
        let weights: Vec<Host> = (0..world_size)
            .map(|_| Host {
                shape: whole.shape,
                values: random.small_ints(2 * len),
            })
            .collect();
        let sum = Host::sum(&weights);
        let gradients = on_groups(&[("cp", world_size)], |groups| {
            let cp = ThdSharder::new(sharder(&groups, config()), in_chunks(num_chunks)).unwrap();
            let media = packed.slots(num_chunks);
            let step = cp.shard(packed.batch::<B>(), media, &device()).unwrap();
            let rank = cp.context().group().rank();
            let leaf: Tensor<B, 3> = whole.tensor::<B>(DType::F64).require_grad();
            let shard = step.shard_tokens(leaf.clone(), 1, Coordinates::Input);
            assert_eq!(shard.dims(), [num_chunks, step.local_len(), 2]);
            // The streams of the same tokens are the same shard.
            let streams = leaf.clone().reshape([num_chunks, len / num_chunks, 2]);
            let again = step.shard_tokens(streams.clone(), 1, Coordinates::Padded);
            assert_eq!(Host::of(&again), Host::of(&shard));
            let back = step.gather_tokens(shard.clone(), 1, Coordinates::Input);
            assert_eq!(Host::of(&back), whole);
            let back = step.gather_tokens(shard.clone(), 1, Coordinates::Padded);
            assert_eq!(Host::of(&back), Host::of(&streams));
            let back = step.gather_tokens_for_replicated_loss(shard.clone(), 1, Coordinates::Input);
            assert_eq!(Host::of(&back), whole);
            // Other kinds, tokens along the last dim.
            let bools = whole
                .int_tensor::<B>()
                .greater_elem(0)
                .swap_dims(1, 2)
                .swap_dims(0, 1);
            let shard = step.shard_tokens(bools.clone(), 2, Coordinates::Input);
            let back = step.gather_tokens(shard, 2, Coordinates::Input);
            assert_eq!(Host::of(&back.int()), Host::of(&bools.int()));

            let shard = step.shard_tokens(leaf.clone(), 1, Coordinates::Input);
            let back = step.gather_tokens(shard, 1, Coordinates::Input);
            let loss = (back * weights[rank].tensor(DType::F64)).sum();
            Host::of(&leaf.grad(&backward(&loss, cp.context().group())).unwrap())
        });
        // Each rank's leaf has the sum of all ranks' weights at its own tokens.
        assert_eq!(Host::sum(&gradients), sum);
    }
}

#[test]
fn verbs_over_chunks_ask_for_the_rows_of_a_batch() {
    type B = TestBackend;
    let packed = Packed::random(&mut Random::new(3), 4, 2);
    let cp = burn_cp::sharder::ContextParallel::solo(config());
    let cp = ThdSharder::new(cp, in_chunks(2)).unwrap();
    let step = cp.shard(packed.batch::<B>(), packed.slots(2), &device());
    let step = step.unwrap();
    let whole = |shape: [usize; 2]| Tensor::<B, 2>::zeros(shape, &device());
    let [rows, seq] = packed.size;
    for (shape, dim, expected) in [
        ([rows + 1, seq], 1, "expected 4 rows"),
        ([rows, seq + 1], 1, "tokens in dim 1"),
        ([seq, rows], 0, "expected 4 rows"),
        ([rows, seq], 2, "expected 4 rows"),
    ] {
        let message = panic_of(|| {
            step.shard_tokens(whole(shape), dim, Coordinates::Input);
        });
        assert!(message.contains(expected), "{message}");
    }
    let message = panic_of(|| {
        step.gather_tokens(whole([3, step.local_len()]), 1, Coordinates::Input);
    });
    assert!(message.contains("expected 2 rows"), "{message}");
}

/// What two ranks both say of a batch of `lengths` (real and padded), without waiting for each other.
fn refused(lengths: &[Vec<[usize; 2]>], num_chunks: usize) -> StepError {
    let size = [lengths.len(), 8];
    let packed = Packed {
        size,
        ids: vec![1; size[0] * 8],
        labels: vec![-100; size[0] * 8],
        positions: vec![0; 3 * size[0] * 8],
        lengths: lengths.to_vec(),
    };
    let errors = with_deadline(&[("cp", 2)], DEADLINE, |groups| {
        let cp = ThdSharder::new(sharder(&groups, config()), in_chunks(num_chunks)).unwrap();
        let error = cp.shard(packed.batch::<TestBackend>(), vec![], &device());
        // The group still works: nothing was half done.
        groups.world().unwrap().barrier().unwrap();
        error.map(|_| ()).expect_err("this batch must be refused")
    });
    let mut errors = errors.unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(errors[0].to_string(), errors[1].to_string());
    errors.swap_remove(0)
}

#[test]
fn documents_that_two_ranks_cannot_share_are_refused_alike_and_before_anything_is_sent() {
    let full = || vec![[8, 8]];
    assert!(matches!(
        refused(&[vec![[6, 6], [2, 2]]], 1),
        StepError::Layout(LayoutError::DocumentDivisibility {
            document: 0,
            expected: 4,
            ..
        })
    ));
    for (row, got) in [(vec![[4, 4]], 4), (vec![[3, 4], [0, 0]], 4), (vec![], 0)] {
        let uncovered = |error: &StepError| matches!(error, StepError::Thd(ThdError::Uncovered { expected: 8, got: found }) if *found == got);
        let error = refused(&[full(), row], 2);
        let StepError::Thd(ThdError::Chunk { chunk: 1, source }) = &error else {
            panic!("{error}");
        };
        assert!(uncovered(source), "{error}");
    }
    assert!(matches!(
        refused(&[full(), full(), full()], 2),
        StepError::Thd(ThdError::Remainder { rows: 3, got: 2 })
    ));
}

#[test]
fn ranks_that_cut_a_batch_differently_are_told() {
    let packed = Packed::random(&mut Random::new(3), 2, 4);
    let failed = with_deadline(&[("cp", 2)], DEADLINE, |groups| {
        let chunks = in_chunks(1 + groups.world().unwrap().rank());
        let cp = ThdSharder::new(sharder(&groups, config()), chunks.clone()).unwrap();
        let media = packed.slots(chunks.num_chunks);
        cp.shard(packed.batch::<TestBackend>(), media, &device())
            .unwrap_err()
            .to_string()
    });
    let error = failed.expect_err("the ranks hold other streams");
    let LaunchError::Rank(failure) = &error else {
        panic!("{error}");
    };
    let cause = &failure.cause;
    let differs = matches!(cause, FailureCause::Comm(CommError::Disagreement { .. }));
    assert!(differs, "{error}");
}

#[test]
fn heads_that_ranks_cannot_trade_are_refused_before_a_model_is_built() {
    on_groups(&[("cp", 3)], |groups| {
        let check = |exchange, heads, kv_heads| {
            let config = ContextParallelConfig {
                exchange,
                ..config()
            };
            sharder(&groups, config).check_heads(heads, kv_heads)
        };
        let heads = |what, got| {
            Err(PlanError::HeadDivisibility {
                what,
                expected: 3,
                got,
            })
        };
        let by_heads = ExchangeStrategy::HeadAllToAll;
        assert_eq!(check(by_heads, 6, 3), Ok(()));
        assert_eq!(check(by_heads, 4, 3), heads("heads", 4));
        assert_eq!(check(by_heads, 6, 2), heads("K/V heads", 2));
        assert_eq!(check(ExchangeStrategy::NeededOnly, 4, 2), Ok(()));
    });
}
