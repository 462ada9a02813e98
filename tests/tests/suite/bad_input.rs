//! Wrong input is refused before anything is exchanged: the same error on both ranks, and nobody waits.

use std::time::{Duration, Instant};

use burn::tensor::{Tensor, TensorData};
use burn_cp::{
    attention::AttentionOptions,
    batch::{BatchError, PadRule, SequenceBatch, Stream, StreamDeclaration},
    comm::{self, CommError, FailureCause},
    launch::{self, LaunchError, ThreadsOptions},
    layout::{Documents, LayoutError, LayoutPolicy},
    mesh::{DeviceMesh, MeshError},
    nn::{ContextParallelAttentionConfig, NnError},
    sharder::{ContextParallel, ContextParallelConfig, StepError},
};
use burn_cp_tests::{DEADLINE, TestBackend, device, sharder, with_deadline};

pub(crate) type B = TestBackend;

/// Well before the deadline.
const SOON: Duration = Duration::from_millis(DEADLINE.as_secs() * 500);

/// Shards a batch on two ranks, both of which must refuse it, alike, and long before the deadline.
pub(crate) fn refused_with(
    config: &ContextParallelConfig,
    batch: impl Fn() -> SequenceBatch<B> + Sync,
) -> StepError {
    let start = Instant::now();
    let results = with_deadline(&[("cp", 2)], DEADLINE, |groups| {
        let cp = sharder(&groups, config.clone());
        let error = cp
            .shard(batch(), &device())
            .expect_err("this batch must be refused");
        // The group still works: nothing was half done.
        groups.world().unwrap().barrier().unwrap();
        error
    });
    let mut errors =
        results.unwrap_or_else(|error| panic!("a refused batch must not end the world: {error}"));
    // A device makes its kernels meanwhile.
    assert!(start.elapsed() < SOON, "took {:?}", start.elapsed());
    assert_eq!(errors[0].to_string(), errors[1].to_string());
    errors.swap_remove(0)
}

pub(crate) fn refused(batch: impl Fn() -> SequenceBatch<B> + Sync) -> BatchError {
    match refused_with(&ContextParallelConfig::default(), batch) {
        StepError::Batch(error) => error,
        other => panic!("expected an error of the batch, got {other}"),
    }
}

fn zeros(shape: impl Into<Vec<usize>>) -> TensorData {
    TensorData::zeros::<i64, _>(shape.into())
}

pub(crate) fn ids() -> SequenceBatch<B> {
    SequenceBatch::from_ids(zeros([2, 6]))
}

#[test]
fn a_world_without_ranks_is_refused() {
    let none = launch::threads(0, |_| Ok::<_, CommError>(()));
    assert!(matches!(none, Err(LaunchError::EmptyWorld)));
    let none = launch::threads_detached(0, ThreadsOptions::default(), |_| Ok::<_, CommError>(()));
    assert!(matches!(none, Err(LaunchError::EmptyWorld)));
    assert!(matches!(
        DeviceMesh::new([("dp", 2), ("cp", 0)]),
        Err(MeshError::ZeroSize { .. })
    ));
    let layout = LayoutPolicy::HeadTail.layout(&Documents::full(1, 8).unwrap(), 0);
    assert_eq!(layout, Err(LayoutError::ZeroRanks));
}

#[test]
fn a_mesh_of_another_size_than_the_world_is_refused_with_all_its_factors() {
    let mesh = DeviceMesh::new([("dp", 2), ("cp", 3)]).unwrap();
    let errors = launch::threads(4, |rank| {
        Ok::<_, CommError>(comm::bind(&mesh, &rank).map(|_| ()).unwrap_err())
    })
    .unwrap();
    for error in errors {
        assert!(
            matches!(
                error,
                CommError::Mesh(MeshError::WorldSize {
                    expected: 6,
                    got: 4,
                    ..
                })
            ),
            "{error}"
        );
        assert!(error.to_string().contains("dp=2 x cp=3"), "{error}");
    }
}

#[test]
fn an_axis_that_the_mesh_does_not_have_is_refused_by_name() {
    let errors = with_deadline(&[("cp", 2)], DEADLINE, |groups| {
        burn_cp::sharder::ContextParallel::new(&groups, ContextParallelConfig::default())
            .unwrap_err()
            .to_string()
    });
    for error in errors.unwrap() {
        assert!(error.contains("dp") && error.contains("cp"), "{error}");
    }
}

#[test]
fn an_empty_batch_is_refused() {
    for shape in [[0, 6], [2, 0]] {
        let error = refused(|| SequenceBatch::from_ids(zeros(shape)));
        assert_eq!(
            error,
            BatchError::Empty {
                shape: shape.to_vec()
            }
        );
    }
    let error = refused(|| SequenceBatch::from_ids(zeros([6])));
    assert!(
        matches!(error, BatchError::Shape { ref what, .. } if what == "ids"),
        "{error}"
    );
}

#[test]
fn streams_of_another_shape_are_refused_by_name() {
    let what = |batch: &(dyn Fn() -> SequenceBatch<B> + Sync)| match refused(batch) {
        BatchError::Shape {
            what,
            expected,
            got,
        } => {
            assert!(
                expected.contains("[2, 6]") && got != [2, 6],
                "{what}: {expected}, {got:?}"
            );
            what
        }
        other => panic!("expected an error of shape, got {other}"),
    };
    for shape in [vec![2, 5], vec![1, 6], vec![6, 2], vec![12], vec![1, 2, 6]] {
        assert_eq!(what(&|| ids().with_labels(zeros(shape.clone()))), "labels");
    }
    for shape in [
        vec![2, 5],
        vec![6],
        vec![3, 2, 5],
        vec![0, 2, 6],
        vec![1, 3, 2, 6],
    ] {
        assert_eq!(
            what(&|| ids().with_positions(zeros(shape.clone()))),
            "positions"
        );
    }
}

#[test]
fn streams_of_floats_are_refused_where_integers_are_meant() {
    let floats = || TensorData::zeros::<f32, _>([2, 6]);
    for (batch, name) in [
        (
            &(|| ids().with_labels(floats())) as &(dyn Fn() -> SequenceBatch<B> + Sync),
            "labels",
        ),
        (&|| ids().with_positions(floats()), "positions"),
        (&|| SequenceBatch::from_ids(floats()), "ids"),
    ] {
        let error = refused(batch);
        assert!(
            matches!(error, BatchError::Dtype { ref what, .. } if what == name),
            "{error}"
        );
    }
}

#[test]
fn a_label_outside_the_vocabulary_is_refused_with_its_place() {
    for label in [10, -1, -99, i64::MAX] {
        let labels =
            move || TensorData::new(vec![-100, 0, 9, 3, 0, 0, 0, label, 0, 0, 0, 0], [2, 6]);
        let error = refused(|| ids().with_labels(labels()).with_vocab_size(10));
        assert_eq!(
            error,
            BatchError::Label {
                row: 1,
                token: 1,
                label,
                vocab_size: 10
            }
        );
    }
}

#[test]
fn documents_that_do_not_fit_the_stream_are_refused() {
    for (batch, seq) in [(2, 5), (2, 7), (1, 6), (3, 6)] {
        let error = refused(|| ids().with_documents(Documents::full(batch, seq).unwrap()));
        assert_eq!(
            error,
            BatchError::Documents {
                expected: [2, 6],
                got: [batch, seq]
            }
        );
    }
    let past = Documents::from_lengths(&[vec![4, 3]], 6);
    assert!(
        matches!(
            past,
            Err(LayoutError::PastStream {
                row: 0,
                document: 1,
                expected: 6,
                got: 7
            })
        ),
        "{past:?}"
    );
}

#[test]
fn a_layout_that_does_not_fit_is_refused() {
    let refused = |layout| {
        let config = ContextParallelConfig {
            layout,
            ..ContextParallelConfig::default()
        };
        match refused_with(&config, ids) {
            StepError::Layout(error) | StepError::Batch(BatchError::Layout(error)) => error,
            other => panic!("expected an error of the layout, got {other}"),
        }
    };
    assert!(matches!(
        refused(LayoutPolicy::Identity),
        LayoutError::WorldSize { got: 2, .. }
    ));
    let custom = |ranks: [std::ops::Range<usize>; 2]| {
        LayoutPolicy::Custom(ranks.map(|range| vec![range]).to_vec())
    };
    assert!(matches!(
        refused(custom([0..3, 4..6])),
        LayoutError::Gap { .. }
    ));
    assert!(matches!(
        refused(custom([0..4, 3..6])),
        LayoutError::Overlap { .. }
    ));
    assert!(matches!(
        refused(custom([0..2, 2..5])),
        LayoutError::Gap { .. }
    ));
}

#[test]
fn a_stream_that_nobody_declared_or_that_has_other_tokens_is_refused() {
    let stream = |len: usize| Stream::new(Tensor::<B, 2>::zeros([2, len], &device()));
    let error = refused(|| ids().with_stream("weights", stream(6)));
    assert_eq!(
        error,
        BatchError::UnknownStream {
            name: "weights".into(),
            declared: vec![]
        }
    );
    for dim in [0, 1, 2] {
        let declared = burn_cp::batch::StreamDeclaration {
            name: "weights".into(),
            dim,
            pad: burn_cp::batch::PadRule::Value(0.0),
        };
        let config = ContextParallelConfig {
            streams: vec![declared],
            ..ContextParallelConfig::default()
        };
        let error = refused_with(&config, || ids().with_stream("weights", stream(5)));
        assert!(
            matches!(error, StepError::Batch(BatchError::Shape { ref what, .. }) if what.contains("weights")),
            "{error}"
        );
    }
}

/// Both ranks panic in their own code; the world ends at once, and names both numbers and no collective.
#[test]
fn heads_that_do_not_divide_are_refused_before_any_collective() {
    let start = Instant::now();
    let world = with_deadline(&[("cp", 2)], DEADLINE, |groups| {
        let step = sharder(&groups, ContextParallelConfig::default())
            .shard(ids(), &device())
            .unwrap();
        let heads = |num| Tensor::<B, 4>::zeros([2, num, step.local_len(), 4], &device());
        step.attention(heads(5), heads(3), heads(3), &AttentionOptions::causal())
    });
    assert!(start.elapsed() < SOON, "took {:?}", start.elapsed());
    match world {
        Err(LaunchError::Rank(failure)) => {
            let FailureCause::Panic(message) = &failure.cause else {
                panic!("{failure}")
            };
            assert!(
                message.contains("num_heads") && message.contains("num_kv_heads"),
                "{message}"
            );
            assert!(message.contains('5') && message.contains('3'), "{message}");
            assert!(
                failure.op.contains("own code") && !failure.op.contains("attention"),
                "{failure}"
            );
        }
        other => panic!("expected a rank's failure, got {:?}", other.map(|_| ())),
    }
    let layer = ContextParallelAttentionConfig::new(20, 5, 3, 4).init::<B>(&device());
    assert!(matches!(
        layer,
        Err(NnError::HeadGroups {
            num_heads: 5,
            num_kv_heads: 3
        })
    ));
}

fn none_marked() -> TensorData {
    TensorData::new(vec![false; 12], [2, 6])
}

/// Filling it would launch a kernel over nothing, after which CUDA fails whatever else is on the stream.
fn no_rows(width: usize) -> Tensor<B, 2> {
    Tensor::empty([0, width], &device())
}

fn weights() -> Stream<B> {
    Stream::new(Tensor::<B, 2>::zeros([2, 6], &device()))
}

/// Ranks that hold different batches are told so, though each batch is a good one.
#[test]
fn ranks_with_different_batches_disagree() {
    for change in 0..6 {
        // Starting a device is not what is timed.
        drop(Tensor::<B, 1>::zeros([1], &device()).into_data());
        let start = Instant::now();
        let errors = with_deadline(&[("cp", 2)], DEADLINE, |groups| {
            let odd = groups.global_rank() == 1;
            let mut batch = ids();
            if change == 3 {
                batch = batch.with_deepstack(none_marked(), vec![no_rows(2)]);
            }
            if odd {
                batch = match change {
                    0 => SequenceBatch::from_ids(TensorData::ones::<i64, _>([2, 6])),
                    1 => batch.with_labels(zeros([2, 6])),
                    2 => batch.with_deepstack(none_marked(), vec![no_rows(2)]),
                    3 => batch.with_deepstack(none_marked(), vec![no_rows(2), no_rows(2)]),
                    4 => batch.with_stream("weights", weights()),
                    _ => batch.with_documents(
                        Documents::from_lengths(&[vec![2, 4], vec![6]], 6).unwrap(),
                    ),
                };
            }
            let declared = StreamDeclaration {
                name: "weights".into(),
                dim: 1,
                pad: PadRule::Value(0.0),
            };
            let config = ContextParallelConfig {
                streams: vec![declared],
                ..Default::default()
            };
            let cp = sharder(&groups, config);
            cp.shard(batch, &device())
                .map(|_| ())
                .unwrap_err()
                .to_string()
        });
        assert!(start.elapsed() < SOON, "took {:?}", start.elapsed());
        // The first failure ends the world, whoever returns what.
        let error = errors.unwrap_err().to_string();
        assert!(
            error.contains("disagree") && error.contains("plan of the step"),
            "{error}"
        );
    }
}

#[test]
fn loss_axes_that_leave_out_the_sharded_axis_are_refused() {
    let mesh = DeviceMesh::new([("dp", 1), ("cp", 2)]).unwrap();
    let errors = launch::threads(2, |rank| {
        let groups = comm::bind(&mesh, &rank)?;
        let config = ContextParallelConfig {
            loss_axes: vec!["dp".to_owned()],
            ..ContextParallelConfig::default()
        };
        let error = ContextParallel::new(&groups, config).expect_err("half a loss");
        Ok::<_, CommError>(error.to_string())
    })
    .unwrap();
    assert_eq!(errors[0], errors[1]);
    assert!(
        errors[0].contains("loss_axes") && errors[0].contains("cp"),
        "{}",
        errors[0]
    );
}
