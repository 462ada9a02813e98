//! Meetings that go wrong, and who is named for it.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::{
    CollectiveKind, CommError, FailureCause, Hub, ProcessGroup, RankContext, Signature, bind,
    odd_one_out,
};
use crate::mesh::DeviceMesh;

/// Runs `f` on every rank of a world, with the group of all ranks; the ranks' results and the first failure.
fn world<T: Send>(
    world_size: usize,
    deadline: Duration,
    f: impl Fn(&RankContext, ProcessGroup) -> T + Sync,
) -> (Vec<T>, Option<super::RankFailure>) {
    let mesh = DeviceMesh::new([("cp", world_size)]).unwrap();
    let hub = Hub::new(world_size, deadline);
    let results = thread::scope(|scope| {
        let ranks: Vec<_> = (0..world_size)
            .map(|rank| {
                let (context, mesh, f, hub) =
                    (RankContext::new(rank, hub.clone()), &mesh, &f, &hub);
                scope.spawn(move || {
                    let result = f(&context, bind(mesh, &context).unwrap().world().unwrap());
                    hub.end(rank);
                    result
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    (results, hub.failure())
}

const LONG: Duration = Duration::from_secs(20);

fn tensor(kind: CollectiveKind, size: usize) -> Signature {
    Signature {
        kind,
        dtype: "F32".to_owned(),
        shape: vec![Some(size)],
        ..Signature::control("test")
    }
}

#[test]
fn the_minority_is_the_odd_one_and_ties_go_to_the_lower_rank() {
    assert_eq!(odd_one_out(&[1, 1, 1]), None);
    assert_eq!(odd_one_out(&[2, 1, 1]), Some((0, 1)));
    assert_eq!(odd_one_out(&[1, 1, 2, 1]), Some((2, 0)));
    assert_eq!(odd_one_out(&[1, 2]), Some((1, 0)));
    assert_eq!(odd_one_out(&[3, 1, 2, 2]), Some((0, 2)));
    assert_eq!(odd_one_out::<u8>(&[]), None);
}

#[test]
fn another_shape_is_a_mismatch_on_every_rank_and_names_the_odd_one() {
    for odd in 0..3 {
        let (results, failure) = world(3, LONG, |context, group| {
            let size = if context.rank() == odd { 5 } else { 4 };
            group
                .post(
                    group.next_number(),
                    tensor(CollectiveKind::AllReduce, size),
                    (),
                )?
                .wait()
                .map(|_| ())
        });
        for result in results {
            let CommError::Mismatch {
                rank,
                expected,
                got,
                ..
            } = result.unwrap_err()
            else {
                panic!("a mismatch")
            };
            assert_eq!(rank, odd);
            assert!(
                expected.contains("[4]") && got.contains("[5]"),
                "{expected} {got}"
            );
        }
        let failure = failure.unwrap();
        assert_eq!(failure.rank, odd);
        assert!(
            failure.op.contains("all_reduce") && failure.op.contains("[5]"),
            "{}",
            failure.op
        );
    }
}

#[test]
fn a_host_message_against_a_tensor_operation_is_a_mismatch_at_once() {
    let start = Instant::now();
    let (results, failure) = world(3, LONG, |context, group| {
        if context.rank() == 2 {
            group.barrier()
        } else {
            group
                .post(
                    group.next_number(),
                    tensor(CollectiveKind::AllReduce, 4),
                    (),
                )?
                .wait()
                .map(|_| ())
        }
    });
    assert!(start.elapsed() < LONG / 4);
    assert!(results.iter().all(Result::is_err));
    let failure = failure.unwrap();
    assert_eq!(failure.rank, 2);
    assert!(failure.op.contains("barrier"), "{}", failure.op);
    assert!(matches!(
        failure.cause,
        FailureCause::Comm(CommError::Mismatch { rank: 2, .. })
    ));
}

#[test]
fn a_disagreement_is_the_same_error_on_every_rank() {
    for _ in 0..50 {
        let (results, failure) = world(4, LONG, |context, group| {
            group.agree(
                "a value",
                usize::from(context.rank() == 1),
                ToString::to_string,
            )
        });
        for result in results {
            let error = result.unwrap_err();
            assert!(
                matches!(error, CommError::Disagreement { rank: 1, .. }),
                "{error}"
            );
        }
        assert_eq!(failure.unwrap().rank, 1);
    }
}

#[test]
fn a_rank_that_ended_is_not_waited_for() {
    let start = Instant::now();
    let (results, failure) = world(2, LONG, |context, group| {
        if context.rank() == 1 {
            Ok(())
        } else {
            group.barrier()
        }
    });
    assert!(start.elapsed() < LONG / 4);
    assert!(
        matches!(&results[0], Err(CommError::PeerLeft { rank: 1, op }) if op.contains("barrier"))
    );
    assert_eq!(failure.unwrap().rank, 1);
}

#[test]
fn a_timeout_blames_the_rank_that_everybody_waits_for_in_the_end() {
    let deadline = Duration::from_millis(300);
    let mesh = DeviceMesh::new([("dp", 2), ("cp", 2)]).unwrap();
    let (results, failure) = world(4, deadline, |context, group| {
        let pair = bind(&mesh, context).unwrap().along(&["cp"]).unwrap();
        match context.rank() {
            // Arrives late in its pair, so that the others' deadline in the larger group passes first.
            2 => thread::sleep(deadline / 2),
            3 => thread::sleep(deadline * 4),
            _ => {}
        }
        pair.barrier()?;
        group.barrier()
    });
    assert!(results.iter().all(Result::is_err));
    let failure = failure.unwrap();
    assert_eq!(failure.rank, 3, "{failure}");
    assert!(failure.op.contains("cp[2, 3]"), "{}", failure.op);
}

#[test]
fn groups_that_are_bound_twice_do_not_mix_their_messages() {
    let mesh = DeviceMesh::new([("cp", 2)]).unwrap();
    let (results, failure) = world(2, LONG, |context, first| {
        let second = bind(&mesh, context).unwrap().world().unwrap();
        (0..200).all(|i| {
            let group = if i % 2 == 0 { &first } else { &second };
            group.host_all_gather("round", i).unwrap() == [i, i]
        })
    });
    assert_eq!(results, [true, true]);
    assert!(failure.is_none());
}
