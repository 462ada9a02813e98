//! A batch that one rank has read reaches all ranks of its group.

use burn::{
    backend::Autodiff,
    tensor::{Bool, Float, Int, Tensor, TensorData},
};
use burn_cp::{
    attention::ContextParallelBackend,
    batch::{Media, PadRule, SequenceBatch, Stream, StreamDeclaration},
    layout::{Documents, LayoutPolicy},
    sharder::{ContextParallelConfig, CpStep},
};
use burn_cp_tests::{
    DEADLINE, TestBackend, device, floats, ints, on_groups, sharder, with_deadline,
};

use crate::steps::config;

fn declared() -> ContextParallelConfig {
    let declare = |name: &str| StreamDeclaration {
        name: name.into(),
        dim: 1,
        pad: PadRule::Value(0.0),
    };
    ContextParallelConfig {
        streams: ["floats", "ints", "bools"].map(declare).to_vec(),
        ..config(&LayoutPolicy::HeadTail)
    }
}

/// A batch with everything that a batch can have; `from` tells batches apart.
fn batch<B: ContextParallelBackend>(embeddings: bool, from: i64) -> SequenceBatch<B> {
    let device = device();
    let count = |len: i64| Tensor::<B, 1, Int>::arange(from..from + len, &device);
    let host = |len: i64| (from..from + len).collect::<Vec<_>>();
    let marked = TensorData::new(
        (0..14).map(|i| i == 3 || i == 9).collect::<Vec<_>>(),
        [2, 7],
    );
    let primary = if embeddings {
        SequenceBatch::from_embeddings(count(28).float().reshape([2, 7, 2]))
    } else {
        SequenceBatch::from_ids(TensorData::new(host(14), [2, 7]))
    };
    let mut labels = host(14);
    // Padding, by the mask below.
    labels[6] = -100;
    primary
        .with_labels(TensorData::new(labels, [2, 7]))
        .with_vocab_size(200)
        .with_positions(TensorData::new(host(42), [3, 2, 7]))
        .with_aligned_documents(
            Documents::from_lengths(&[vec![3, 4], vec![7]], 7)
                .unwrap()
                .aligned(4)
                .unwrap()
                .flattened(),
        )
        .with_padding_mask(TensorData::new(
            (0..14).map(|i| i == 6).collect::<Vec<_>>(),
            [2, 7],
        ))
        .with_media(Media {
            name: "image".into(),
            pixels: count(24).float().reshape([8, 3]),
            grids: vec![[1, 2, 2], [1, 2, 2]],
            spatial_merge_size: 2,
            placeholders: marked.clone(),
        })
        .with_deepstack(
            marked,
            vec![
                count(4).float().reshape([2, 2]),
                count(6).float().reshape([2, 3]),
            ],
        )
        .with_stream("floats", Stream::new(count(14).float().reshape([2, 7])))
        .with_stream("ints", Stream::new(count(14).reshape([2, 7])))
        .with_stream(
            "bools",
            Stream::new(count(14).reshape([2, 7]).greater_elem(from + 5)),
        )
}

fn everything<B: ContextParallelBackend>(step: &CpStep<B>) -> (Vec<Vec<i64>>, Vec<Vec<f64>>) {
    let integers = vec![
        step.ids().map_or(Vec::new(), |ids| ints(&ids)),
        step.labels().unwrap().to_vec(),
        ints(&step.positions()),
        ints(&step.padding_mask().int()),
        ints(&step.media_mask().int()),
        ints(&step.stream::<2, Int>("ints").unwrap()),
        ints(&step.stream::<2, Bool>("bools").unwrap().int()),
    ];
    let mut values = vec![
        step.embeddings().map_or(Vec::new(), |all| floats(&all)),
        floats(&step.stream::<2, Float>("floats").unwrap()),
    ];
    values.extend(step.deepstack().iter().map(floats));
    (integers, values)
}

fn arrives<B: ContextParallelBackend>(embeddings: bool) {
    for root in 0..3 {
        on_groups(&[("dp", 2), ("cp", 3)], |groups| {
            let (dp, cp) = (groups.along(&["dp"]).unwrap(), sharder(&groups, declared()));
            let device = device();
            // The two groups read different batches.
            let read = || batch::<B>(embeddings, 10 + 7 * dp.rank() as i64);
            let own = (cp.group().rank() == root).then(read);
            let received = cp.broadcast_batch(own, root, &device).unwrap();
            let got = cp.shard(received, &device).unwrap();
            let want = cp.shard(read(), &device).unwrap();
            assert_eq!(everything(&got), everything(&want));
        });
    }
}

#[test]
fn a_batch_arrives_whole_on_every_rank_of_its_group() {
    arrives::<TestBackend>(false);
    arrives::<TestBackend>(true);
    arrives::<Autodiff<TestBackend>>(true);
}

#[test]
fn a_batch_on_no_rank_or_on_the_wrong_one_is_the_same_error_everywhere() {
    for (giving, expected) in [
        (vec![], "expected [1], got []"),
        (vec![0], "got [0]"),
        (vec![0, 1], "got [0, 1]"),
    ] {
        let errors = with_deadline(&[("cp", 3)], DEADLINE, |groups| {
            let cp = sharder(&groups, declared());
            let own = giving
                .contains(&cp.group().rank())
                .then(|| batch::<TestBackend>(false, 1));
            let result = cp.broadcast_batch(own, 1, &device());
            result.unwrap_err().to_string()
        })
        .unwrap();
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
        assert!(errors[0].contains(expected), "{errors:?}");
    }
    let errors = on_groups(&[("cp", 2)], |groups| {
        let cp = sharder(&groups, declared());
        let result = cp.broadcast_batch::<TestBackend>(None, 2, &device());
        result.unwrap_err().to_string()
    });
    let expected = "expected one rank below 2 on all ranks, got [2, 2]";
    assert!(errors[0].contains(expected), "{errors:?}");
    let errors = on_groups(&[("cp", 2)], |groups| {
        let cp = sharder(&groups, declared());
        let root = cp.group().rank();
        let own = (root == 0).then(|| batch::<TestBackend>(false, 1));
        let result = cp.broadcast_batch(own, root, &device());
        result.unwrap_err().to_string()
    });
    assert!(errors[0].contains("got [0, 1]"), "{errors:?}");
    assert_eq!(errors[0], errors[1]);
}
