//! A tower that fails on one rank, or makes something else there.

use super::*;

/// Runs three ranks of which rank 1 has a faulty tower; what each rank's call returned, and the world's failure.
fn with_fault(fault: Fault, grids: &[[usize; 3]], floor: usize) -> (Vec<VisionError>, RankFailure) {
    let errors = Mutex::new(Vec::new());
    let outcome = ranks(3, |group| {
        let mut tower = Tower::new(true);
        if group.rank() == 1 {
            tower.fault = fault;
        }
        let config = VisionShardingConfig::always().with_min_local_patch_rows(floor);
        let error = FrameSharded::new(&tower, group, &config)
            .forward(pixels_of(grids), grids)
            .unwrap_err();
        errors.lock().unwrap().push(error);
    });
    let Err(LaunchError::Rank(failure)) = outcome else {
        panic!("the world failed on a rank, got {outcome:?}")
    };
    (errors.into_inner().unwrap(), failure)
}

#[test]
fn the_fault_of_one_tower_is_the_same_error_on_every_rank() {
    let grids = [[1, 2, 2], [2, 4, 4], [1, 2, 4]];
    for (fault, message) in [
        (
            Fault::ExtraRow,
            "rank 1 failed in vision tower: embeddings: expected 4 rows, one per merged token, got 5",
        ),
        (
            Fault::LongLayer,
            "rank 1 failed in vision tower: deepstack layer 1: expected 4 rows, one per merged token, got 5",
        ),
        (
            Fault::Error,
            "rank 1 failed in vision tower: the lens is fogged",
        ),
        (
            Fault::Panic,
            "rank 1 failed in vision tower: panicked: the lens is broken",
        ),
        (
            Fault::MissingLayer,
            "rank 1 failed in vision tower: output differs from the other ranks': expected embeddings of width [5] and 2 \
             deepstack layers of widths [2, 3], F32, trainable, got embeddings of width [5] and 1 deepstack layers of \
             widths [2], F32, trainable",
        ),
        (
            Fault::WideLayer,
            "rank 1 failed in vision tower: output differs from the other ranks': expected embeddings of width [5] and 2 \
             deepstack layers of widths [2, 3], F32, trainable, got embeddings of width [5] and 2 deepstack layers of \
             widths [2, 6], F32, trainable",
        ),
        (
            Fault::DoubleLayer,
            "rank 1 failed in vision tower: deepstack layer 1: expected the embeddings' dtype F32, got F64",
        ),
        (
            Fault::Double,
            "rank 1 failed in vision tower: output differs from the other ranks': expected embeddings of width [5] and 2 \
             deepstack layers of widths [2, 3], F32, trainable, got embeddings of width [5] and 2 deepstack layers of \
             widths [2, 3], F64, trainable",
        ),
        (
            Fault::Frozen,
            "rank 1 failed in vision tower: output differs from the other ranks': expected embeddings of width [5] and 2 \
             deepstack layers of widths [2, 3], F32, trainable, got embeddings of width [5] and 2 deepstack layers of \
             widths [2, 3], F32, frozen",
        ),
    ] {
        let (errors, failure) = with_fault(fault, &grids, 0);
        let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
        assert_eq!(texts, [message; 3]);
        assert!(
            errors
                .iter()
                .all(|error| matches!(error, VisionError::Tower { rank: 1, .. }))
        );
        assert_eq!(failure.to_string(), message, "the world's first failure");
    }
}

#[test]
fn the_fault_of_a_dummy_frame_counts_too() {
    for fault in [Fault::Panic, Fault::Error] {
        let (errors, failure) = with_fault(fault, &[[1, 4, 4]], 96);
        assert_eq!(errors.len(), 3);
        assert_eq!((failure.rank, failure.op.as_str()), (1, "vision tower"));
    }
}

#[test]
fn the_rows_of_the_floor_are_counted_too() {
    // Rank 1 has one frame of 16 patches, and two of zeros.
    let grids = [[1, 2, 2], [2, 4, 4], [1, 2, 4]];
    let (errors, _) = with_fault(Fault::ExtraRow, &grids, 40);
    let message =
        "rank 1 failed in vision tower: embeddings: expected 12 rows, one per merged token, got 13";
    assert_eq!(errors.len(), 3);
    assert!(
        errors.iter().all(|error| error.to_string() == message),
        "{errors:?}"
    );
}

#[test]
fn a_tower_that_every_rank_runs_whole_fails_where_it_fails() {
    let (mut tower, group) = (Tower::new(true), ProcessGroup::solo());
    tower.fault = Fault::Error;
    let (config, grids) = (VisionShardingConfig::always(), [[1, 2, 2]]);
    let error = FrameSharded::new(&tower, &group, &config)
        .forward(pixels_of(&grids), &grids)
        .unwrap_err();
    let fault = TowerFault::Failed {
        error: "the lens is fogged".to_owned(),
    };
    assert!(
        matches!(&error, VisionError::Tower { rank: 0, fault: got } if *got == fault),
        "{error}"
    );
}

#[test]
fn a_failed_collective_within_a_tower_stays_what_it_is() {
    for fault in [Fault::Comm, Fault::CommError] {
        let outcome = ranks(2, |group| {
            let mut tower = Tower::new(true);
            if group.rank() == 1 {
                tower.fault = fault;
            }
            let (config, grids) = (VisionShardingConfig::always(), [[2, 2, 2]]);
            let error = FrameSharded::new(&tower, group, &config)
                .forward(pixels_of(&grids), &grids)
                .unwrap_err();
            match error {
                VisionError::Comm(error) if group.rank() == 1 => error.raise(),
                VisionError::Comm(CommError::PeerFailed { rank: 1, .. }) => {}
                error => panic!("{error}"),
            }
        });
        let Err(LaunchError::Rank(failure)) = outcome else {
            panic!("the world failed on a rank, got {outcome:?}")
        };
        assert_eq!(failure.rank, 1);
        assert!(
            matches!(
                failure.cause,
                FailureCause::Comm(CommError::PeerLeft { .. })
            ),
            "{failure}"
        );
    }
}
