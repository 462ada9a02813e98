//! One rank of a world of processes, in which something may go wrong: prints one line of JSON with the rank, how it ended and
//! how long it took, and fails where the world did.
//!
//! `process-scenario NAME [mpi]`; with `mpi` tensors travel through it, otherwise ranks exchange host messages only.

#[allow(dead_code, reason = "the suite uses the rest")]
#[path = "../../../tests/suite/operations.rs"]
mod operations;
mod tensors;

use std::{
    error::Error,
    io::Write,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use burn::{
    backend::Flex,
    tensor::{Tensor, TensorData},
};
use burn_cp::{
    batch::SequenceBatch,
    comm::{self, Groups, RankContext},
    launch::{self, Place, Process, ProcessOptions, TensorTransport},
    layout::{Documents, LayoutPolicy},
    mesh::DeviceMesh,
    sharder::{ContextParallel, ContextParallelConfig},
};

/// How long a rank waits for its peers.
const DEADLINE: Duration = Duration::from_secs(5);
/// When a rank that comes too late comes.
const LATE: Duration = Duration::from_secs(8);

type AnyError = Box<dyn Error + Send + Sync>;

fn main() -> ExitCode {
    let name = std::env::args().nth(1).unwrap_or_default();
    let tensors = match std::env::args().nth(2).as_deref() {
        Some("mpi") => TensorTransport::Mpi,
        _ => TensorTransport::None,
    };
    let options = ProcessOptions {
        deadline: DEADLINE,
        tensors,
        ..ProcessOptions::default()
    };
    let start = Instant::now();
    let mut rank = None;
    let result = run(&name, options, &mut rank);
    let line = serde_json::json!({
        "rank": rank,
        "error": result.as_ref().err().map(ToString::to_string),
        "elapsed_ms": start.elapsed().as_millis() as u64,
    });
    say(&line.to_string());
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => {
            // mpirun ends all ranks when the first one fails; the others have something to say, too.
            thread::sleep(Duration::from_millis(500));
            ExitCode::FAILURE
        }
    }
}

/// Prints a line at once, whatever standard output is.
fn say(line: &str) {
    println!("{line}");
    let _ = std::io::stdout().flush();
}

fn run(name: &str, options: ProcessOptions, rank: &mut Option<usize>) -> Result<(), AnyError> {
    let place = Place::from_env().map_err(launch::LaunchError::from)?;
    *rank = Some(place.rank);
    if name == "late" && place.rank == 2 {
        thread::sleep(LATE);
    }
    let process = Process::join(&place, options)?;
    process.run(|context| scenario(name, &context))?;
    Ok(())
}

fn groups(context: &RankContext, dp: usize) -> Result<Groups, AnyError> {
    let cp = context.world_size() / dp;
    let mesh = DeviceMesh::new([("dp", dp), ("cp", cp)])?;
    Ok(comm::bind(&mesh, context)?)
}

fn scenario(name: &str, context: &RankContext) -> Result<(), AnyError> {
    burn_cp_tests::enter_rank(context);
    let world = groups(context, 1)?.world()?;
    match name {
        "messages" | "late" => {
            for round in 0..100 {
                let all = world.host_all_gather("round", (round, context.rank()))?;
                assert!(
                    all.iter()
                        .enumerate()
                        .all(|(rank, got)| *got == (round, rank))
                );
            }
            world.barrier()?;
        }
        "killed-0" | "killed-1" => {
            world.barrier()?;
            if name.ends_with(&context.rank().to_string()) {
                say(&format!("ready {}", std::process::id()));
                thread::sleep(Duration::from_secs(60));
            }
            world.barrier()?;
        }
        "killed-while-others-compute" => {
            world.barrier()?;
            if context.rank() == 1 {
                say(&format!("ready {}", std::process::id()));
                thread::sleep(Duration::from_secs(60));
            }
            thread::sleep(Duration::from_secs(2));
        }
        "other-layout" => other_layout(context)?,
        "endless-exchange" => tensors::endless(context)?,
        "killed-between-collectives" => tensors::stops(context, Duration::from_secs(60), true)?,
        "never-arrives" => tensors::stops(context, LATE, false)?,
        "collectives" => tensors::collectives(context)?,
        "broadcast" => tensors::broadcast(context)?,
        other => return Err(format!("no scenario {other:?}").into()),
    }
    Ok(())
}

/// Every rank plans a step, one of them from another configuration.
fn other_layout(context: &RankContext) -> Result<(), AnyError> {
    let layout = match context.rank() {
        1 => LayoutPolicy::HeadTail,
        _ => LayoutPolicy::Contiguous { multiple: 1 },
    };
    let config = ContextParallelConfig {
        layout,
        ..ContextParallelConfig::default()
    };
    let cp = ContextParallel::new(&groups(context, 1)?, config)?;
    let device = Default::default();
    let batch = SequenceBatch::from_embeddings(Tensor::<Flex, 3>::ones([1, 16, 4], &device))
        .with_labels(TensorData::new((0..16).collect::<Vec<i64>>(), [1, 16]))
        .with_documents(Documents::from_lengths(&[vec![5, 9]], 16)?);
    cp.shard(batch, &device)?;
    Ok(())
}
