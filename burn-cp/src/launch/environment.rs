//! Which rank a process is, from what its launcher has put into the environment.

use std::fmt;

use super::slurm;
use crate::comm::MPI_AVAILABLE;

/// Where the ranks of a world find each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rendezvous {
    /// Rank 0 listens here.
    Address {
        /// Name or address of rank 0's host.
        host: String,
        /// Port.
        port: u16,
    },
    /// Rank 0 listens where it can, and tells the others through MPI.
    ThroughMpi,
    /// A world of one rank, which needs to find nobody.
    Alone,
}

/// A process's place in a world of processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Rank in the world.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Rank among those of this host.
    pub local_rank: usize,
    /// Where the ranks find each other.
    pub rendezvous: Rendezvous,
    /// Name of the job, the same on all its ranks: processes of another one are refused. May be empty.
    pub job: String,
}

/// A set of variables by which launchers describe ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Scheme {
    /// `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`.
    Torchrun,
    /// `OMPI_COMM_WORLD_RANK`, `.._SIZE`, `.._LOCAL_RANK`, and optionally `MASTER_ADDR` with `MASTER_PORT`.
    OpenMpi,
    /// `SLURM_PROCID`, `SLURM_NTASKS`, `SLURM_LOCALID`, `SLURM_JOB_ID`, `SLURM_STEP_NODELIST` or `SLURM_JOB_NODELIST`, and optionally
    /// `MASTER_ADDR` and `MASTER_PORT`.
    Slurm,
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Torchrun => "torchrun",
            Self::OpenMpi => "Open MPI",
            Self::Slurm => "Slurm",
        })
    }
}

/// An environment that does not describe a rank.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EnvironmentError {
    /// No variable of any launcher is set.
    #[error(
        "the environment describes no rank: start this process with torchrun, mpirun or srun, or set RANK, WORLD_SIZE, \
         LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
    )]
    Absent,
    /// Some variables of a launcher are set, others are not.
    #[error("{scheme}'s environment is half set: {} missing; {} set{}", list(.missing), list(.found), advice(.hint))]
    Missing {
        /// Whose variables.
        scheme: Scheme,
        /// What is missing, or empty.
        missing: Vec<&'static str>,
        /// What is there.
        found: Vec<&'static str>,
        /// What to do; may be empty.
        hint: String,
    },
    /// A variable has a value that it cannot have.
    #[error("{variable}: expected {expected}, got {got:?}")]
    Value {
        /// The variable.
        variable: &'static str,
        /// What it may be.
        expected: String,
        /// What it is.
        got: String,
    },
}

fn list(names: &[&str]) -> String {
    match names {
        [] => "nothing is".to_owned(),
        [one] => format!("{one} is"),
        all => format!("{} are", all.join(", ")),
    }
}

fn advice(text: &str) -> String {
    if text.is_empty() {
        String::new()
    } else {
        format!(" ({text})")
    }
}

const ADDR: &str = "MASTER_ADDR";
const PORT: &str = "MASTER_PORT";
const TORCHRUN: [&str; 5] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", ADDR, PORT];
const OPEN_MPI: [&str; 3] = [
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
];
const SLURM: [&str; 3] = ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"];

impl Place {
    /// The place that this process's environment describes.
    ///
    /// torchrun's variables (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`) come before those of Open MPI
    /// (`OMPI_COMM_WORLD_*`), and these before Slurm's (`SLURM_PROCID`, ..): a script that Slurm runs has a rank of its own in
    /// Slurm's variables, which the ranks that its mpirun starts inherit. `MASTER_ADDR` and `MASTER_PORT` also tell the ranks
    /// of mpirun and srun where to meet; without them, rank 0 tells the others through MPI, and Slurm's ranks meet on their first
    /// host, at a port derived from the job's id.
    ///
    /// # Errors
    /// No variable, some of a launcher's but not all, or a value that cannot be.
    pub fn from_env() -> Result<Self, EnvironmentError> {
        let lookup = |name: &str| {
            let value = std::env::var_os(name)?;
            Some(value.to_string_lossy().into_owned())
        };
        Self::read(lookup, MPI_AVAILABLE)
    }

    /// The place that an environment describes: `lookup` gives the value of a variable. `mpi` says whether ranks could find each
    /// other through MPI.
    ///
    /// # Errors
    /// As [`Self::from_env`].
    pub fn read(
        lookup: impl Fn(&str) -> Option<String>,
        mpi: bool,
    ) -> Result<Self, EnvironmentError> {
        let environment = Environment { lookup: &lookup };
        let any = |names: &[&'static str]| names.iter().any(|name| environment.has(name));
        if any(&["RANK", "WORLD_SIZE"]) {
            environment.torchrun()
        } else if any(&OPEN_MPI) {
            environment.open_mpi(mpi)
        } else if any(&SLURM) || environment.has("SLURM_JOB_ID") {
            environment.slurm()
        } else if any(&TORCHRUN) {
            environment.torchrun()
        } else {
            Err(EnvironmentError::Absent)
        }
    }
}

struct Environment<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
}

impl Environment<'_> {
    /// The value of a variable; an empty one is none.
    fn get(&self, name: &str) -> Option<String> {
        (self.lookup)(name).filter(|value| !value.trim().is_empty())
    }

    fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// Refuses an environment in which some of a launcher's variables are missing.
    fn require(
        &self,
        scheme: Scheme,
        names: &[&'static str],
        hint: &str,
    ) -> Result<(), EnvironmentError> {
        let (found, missing): (Vec<_>, Vec<_>) = names.iter().partition(|name| self.has(name));
        if missing.is_empty() {
            return Ok(());
        }
        Err(EnvironmentError::Missing {
            scheme,
            missing,
            found,
            hint: hint.to_owned(),
        })
    }

    fn number<T: std::str::FromStr>(
        &self,
        variable: &'static str,
        expected: &str,
    ) -> Result<T, EnvironmentError> {
        let got = self.get(variable).unwrap_or_default();
        got.trim().parse().map_err(|_| EnvironmentError::Value {
            variable,
            expected: expected.to_owned(),
            got,
        })
    }

    /// Rank, world size and local rank, from variables that are there.
    fn ranks(
        &self,
        [rank, size, local]: [&'static str; 3],
    ) -> Result<(usize, usize, usize), EnvironmentError> {
        let world_size: usize = self.number(size, "a number of ranks, at least 1")?;
        let refused = |variable, expected: String| EnvironmentError::Value {
            variable,
            expected,
            got: self.get(variable).unwrap_or_default(),
        };
        if world_size == 0 {
            return Err(refused(size, "a number of ranks, at least 1".to_owned()));
        }
        let below = format!("a rank below {size} = {world_size}");
        let found = self.number(rank, &below)?;
        if found >= world_size {
            return Err(refused(rank, below));
        }
        let local_below = format!("a rank of this host, below {size} = {world_size}");
        let local_rank = self.number(local, &local_below)?;
        if local_rank >= world_size {
            return Err(refused(local, local_below));
        }
        Ok((found, world_size, local_rank))
    }

    fn port(&self) -> Result<u16, EnvironmentError> {
        let expected = "a port, 1 to 65535";
        match self.number(PORT, expected)? {
            0 => Err(EnvironmentError::Value {
                variable: PORT,
                expected: expected.to_owned(),
                got: "0".to_owned(),
            }),
            port => Ok(port),
        }
    }

    fn torchrun(&self) -> Result<Place, EnvironmentError> {
        self.require(Scheme::Torchrun, &TORCHRUN, "")?;
        let (rank, world_size, local_rank) = self.ranks([TORCHRUN[0], TORCHRUN[1], TORCHRUN[2]])?;
        let mut port = self.port()?;
        // There torchrun itself listens at the port, for its own processes.
        if self.get("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True") {
            port = port.checked_add(1).ok_or(EnvironmentError::Value {
                variable: PORT,
                expected: "a port below 65535: torchrun uses it, and burn-cp the next one"
                    .to_owned(),
                got: port.to_string(),
            })?;
        }
        let run = self.get("TORCHELASTIC_RUN_ID");
        Ok(Place {
            rank,
            world_size,
            local_rank,
            rendezvous: Rendezvous::Address {
                host: self.get(ADDR).unwrap_or_default(),
                port,
            },
            job: run.map_or_else(String::new, |id| format!("torchrun {id}")),
        })
    }

    fn open_mpi(&self, mpi: bool) -> Result<Place, EnvironmentError> {
        self.require(Scheme::OpenMpi, &OPEN_MPI, "")?;
        let (rank, world_size, local_rank) = self.ranks(OPEN_MPI)?;
        let rendezvous = match (self.has(ADDR) || self.has(PORT), mpi) {
            _ if world_size == 1 => Rendezvous::Alone,
            (false, true) => Rendezvous::ThroughMpi,
            (given, _) => {
                let hint = if given {
                    "rank 0 listens where both say"
                } else {
                    "or build with feature `mpi`, so that rank 0 can tell its address through MPI"
                };
                let needed = [&OPEN_MPI[..], &[ADDR, PORT]].concat();
                self.require(Scheme::OpenMpi, &needed, hint)?;
                Rendezvous::Address {
                    host: self.get(ADDR).unwrap_or_default(),
                    port: self.port()?,
                }
            }
        };
        let job = self.get("PMIX_NAMESPACE");
        Ok(Place {
            rank,
            world_size,
            local_rank,
            rendezvous,
            job: job.map_or_else(String::new, |id| format!("Open MPI {id}")),
        })
    }

    fn slurm(&self) -> Result<Place, EnvironmentError> {
        self.require(
            Scheme::Slurm,
            &SLURM,
            "srun sets them, salloc and sbatch do not",
        )?;
        let (rank, world_size, local_rank) = self.ranks(SLURM)?;
        let (id, step) = ("SLURM_JOB_ID", "SLURM_STEP_ID");
        let rendezvous = if world_size == 1 {
            Rendezvous::Alone
        } else {
            let host = self.slurm_host()?;
            let port = if self.has(PORT) {
                self.port()?
            } else {
                self.require(
                    Scheme::Slurm,
                    &[&SLURM[..], &[id]].concat(),
                    "or MASTER_PORT",
                )?;
                let job: u64 = self.number(id, "a job's number")?;
                let step: u64 = if self.has(step) {
                    self.number(step, "a step's number")?
                } else {
                    0
                };
                slurm::port(job, step)
            };
            Rendezvous::Address { host, port }
        };
        let job = [id, step].map(|name| self.get(name).unwrap_or_default());
        Ok(Place {
            rank,
            world_size,
            local_rank,
            rendezvous,
            job: format!("Slurm {}", job.join(".")),
        })
    }

    /// The host of rank 0: the first of the step's, or of the job's.
    fn slurm_host(&self) -> Result<String, EnvironmentError> {
        if let Some(host) = self.get(ADDR) {
            return Ok(host);
        }
        let lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"];
        for variable in lists {
            if let Some(got) = self.get(variable) {
                return slurm::first_host(&got).ok_or(EnvironmentError::Value {
                    variable,
                    expected: "a list of hosts like node[01-04,7],other".to_owned(),
                    got,
                });
            }
        }
        // Where srun was called: rank 0's host on a cluster of one, and where jobs are started from their first host.
        self.get("SLURM_LAUNCH_NODE_IPADDR")
            .ok_or_else(|| EnvironmentError::Missing {
                scheme: Scheme::Slurm,
                missing: vec!["SLURM_JOB_NODELIST"],
                found: SLURM.to_vec(),
                hint:
                    "SLURM_STEP_NODELIST, SLURM_LAUNCH_NODE_IPADDR or MASTER_ADDR would do as well"
                        .to_owned(),
            })
    }
}

#[cfg(test)]
mod tests;
