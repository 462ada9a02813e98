//! Groups that are wider than the ranks that share a sequence.

use super::*;

const GRIDS: [[usize; 3]; 3] = [[1, 2, 2], [3, 4, 4], [1, 2, 4]];

/// The groups of ranks that share a sequence, and of these with their replicas.
fn cp_and_all(groups: &Groups) -> [ProcessGroup; 2] {
    [
        groups.along(&["cp"]).unwrap(),
        groups.along(&["cp", "tp"]).unwrap(),
    ]
}

#[test]
fn gradients_over_replicas_are_refused_before_anything_is_sent() {
    for (trainable, tracked) in [(true, false), (false, true), (true, true)] {
        let errors = replicated_ranks(2, 2, |groups| {
            let [cp, all] = cp_and_all(&groups);
            let (tower, config) = (Tower::new(trainable), VisionShardingConfig::default());
            let mut pixels = pixels_of(&GRIDS);
            if tracked {
                pixels = pixels.require_grad() * 2.0;
            }
            // The other ranks never arrive, so that a message would wait in vain.
            let error = (groups.global_rank() == 3).then(|| {
                FrameSharded::new(&tower, &cp, &config)
                    .over(&all)
                    .forward(pixels, &GRIDS)
                    .unwrap_err()
            });
            assert!(tower.calls.lock().unwrap().is_empty());
            all.barrier().unwrap();
            error
        })
        .unwrap();
        let error = errors.into_iter().flatten().next().unwrap();
        let VisionError::TrainableScope { outside, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(*outside, [0, 2]);
        assert_eq!(
            error.to_string(),
            "vision tower: its parameters or pixels have gradients, so expected a group within cp[1, 3], got \
             cpxtp[0, 1, 2, 3], whose ranks [0, 2] are replicas and would count every gradient again; freeze the tower \
             or split it over cp[1, 3]"
        );
    }
}

#[test]
fn a_frozen_tower_is_split_over_replicas_too() {
    let frozen = Tower::new(false);
    let whole = frozen.forward(pixels_of(&GRIDS), &GRIDS).unwrap();
    let expected: Vec<_> = std::iter::once(whole.embeddings)
        .chain(whole.deepstack)
        .map(values)
        .collect();
    let results = replicated_ranks(2, 2, |groups| {
        let [cp, all] = cp_and_all(&groups);
        let (tower, config) = (Tower::new(false), VisionShardingConfig::always());
        let sharded = FrameSharded::new(&tower, &cp, &config).over(&all);
        let frames = sharded.plan(&GRIDS).unwrap().num_frames_per_rank();
        let features = sharded.forward(pixels_of(&GRIDS), &GRIDS).unwrap();
        let features: Vec<_> = std::iter::once(features.embeddings)
            .chain(features.deepstack)
            .map(values)
            .collect();
        (frames, features)
    })
    .unwrap();
    for (frames, features) in results {
        assert_eq!((frames.len(), frames.iter().sum::<usize>()), (4, 5));
        for (got, expected) in features.iter().zip(&expected) {
            assert_close(got, expected, "over replicas");
        }
    }
}

#[test]
fn a_trained_tower_may_be_split_over_its_group_or_a_part_of_it_or_not_at_all() {
    let run = |tp: usize, axes: &[&str], config: &VisionShardingConfig| {
        replicated_ranks(2, tp, |groups| {
            let [cp, _] = cp_and_all(&groups);
            let (tower, group) = (Tower::new(true), groups.along(axes).unwrap());
            let sharded = FrameSharded::new(&tower, &cp, config).over(&group);
            sharded
                .forward(pixels_of(&GRIDS), &GRIDS)
                .map(|features| features.embeddings.dims()[0])
        })
        .unwrap()
    };
    let always = VisionShardingConfig::always();
    for (tp, axes, config) in [
        (2, &["cp"][..], &always),
        (2, &[], &always),
        (1, &["cp", "tp"], &always),
        (2, &["cp", "tp"], &VisionShardingConfig::replicated()),
    ] {
        for result in run(tp, axes, config) {
            assert_eq!(result.unwrap(), 15, "{axes:?}");
        }
    }
}

#[test]
fn replicas_that_are_given_other_grids_are_named() {
    let errors = Mutex::new(Vec::new());
    let outcome = replicated_ranks(2, 2, |groups| {
        let [cp, all] = cp_and_all(&groups);
        let (tower, config) = (Tower::new(false), VisionShardingConfig::always());
        let grids = if all.rank() == 2 {
            vec![[1, 2, 2]]
        } else {
            GRIDS.to_vec()
        };
        let error = FrameSharded::new(&tower, &cp, &config)
            .over(&all)
            .forward(pixels_of(&grids), &grids)
            .unwrap_err();
        errors.lock().unwrap().push(error);
    });
    assert!(outcome.is_err());
    let errors = errors.into_inner().unwrap();
    assert_eq!(errors.len(), 4);
    for error in errors {
        assert!(
            matches!(
                error,
                VisionError::Comm(CommError::Disagreement { rank: 2, .. })
            ),
            "{error}"
        );
    }
}
