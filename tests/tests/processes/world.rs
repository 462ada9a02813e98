//! Processes that are started, watched and reaped.

use std::{
    io::{BufRead, BufReader, Read},
    net::TcpListener,
    process::{Child, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

/// The deadline that the scenarios run with.
pub(crate) const DEADLINE: Duration = Duration::from_secs(5);
/// What starting and ending may take beyond it on a busy machine.
pub(crate) const MARGIN: Duration = Duration::from_secs(8);
/// When a world counts as hung.
const HUNG: Duration = Duration::from_secs(40);

/// Processes that are killed with the test.
pub(crate) struct World {
    processes: Vec<Process>,
    start: Instant,
}

struct Process {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

/// The scenario's program, without any launcher's variables.
pub(crate) fn command(scenario: &str) -> Command {
    // Tests that were packed for another host have it beside them.
    let packed = std::env::current_exe().map(|test| test.with_file_name("process-scenario"));
    let mut command = match packed {
        Ok(packed) if packed.exists() => Command::new(packed),
        _ => Command::new(env!("CARGO_BIN_EXE_process-scenario")),
    };
    command.arg(scenario);
    clean(&mut command);
    command
}

/// Takes variables of launchers out of a command's environment.
pub(crate) fn clean(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        let launcher = ["OMPI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "MASTER_"];
        let single = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "RUST_BACKTRACE"];
        if launcher.iter().any(|prefix| name.starts_with(prefix)) || single.contains(&&*name) {
            command.env_remove(&name);
        }
    }
}

/// Sets a rank's environment as torchrun does.
pub(crate) fn torchrun(command: &mut Command, port: u16, (rank, world_size): (usize, usize)) {
    command
        .env("RANK", rank.to_string())
        .env("LOCAL_RANK", "0")
        .env("WORLD_SIZE", world_size.to_string())
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string());
}

pub(crate) fn free_port() -> u16 {
    let socket = TcpListener::bind("127.0.0.1:0").expect("a free port");
    socket.local_addr().expect("it is bound").port()
}

impl World {
    pub(crate) fn new() -> Self {
        Self {
            processes: Vec::new(),
            start: Instant::now(),
        }
    }

    /// Every rank of a world.
    pub(crate) fn start(scenario: &str, world_size: usize) -> Self {
        let ranks: Vec<_> = (0..world_size).map(|rank| (rank, world_size)).collect();
        Self::of(scenario, free_port(), &ranks)
    }

    /// A process for each `(RANK, WORLD_SIZE)`.
    pub(crate) fn of(scenario: &str, port: u16, ranks: &[(usize, usize)]) -> Self {
        let mut world = Self::new();
        for rank in ranks {
            world.add(scenario, port, *rank);
        }
        world
    }

    pub(crate) fn add(&mut self, scenario: &str, port: u16, rank: (usize, usize)) {
        let mut command = command(scenario);
        torchrun(&mut command, port, rank);
        self.spawn(&mut command);
    }

    pub(crate) fn spawn(&mut self, command: &mut Command) {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the program starts");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        self.processes.push(Process { child, stdout });
    }

    pub(crate) fn check_time(&self) {
        assert!(self.start.elapsed() < HUNG, "the world hung");
    }

    /// Kills a process as soon as it says that it is ready.
    pub(crate) fn kill_when_ready(&mut self, index: usize) {
        let process = &mut self.processes[index];
        let mut line = String::new();
        // A process that fails closes its output.
        process.stdout.read_line(&mut line).expect("text");
        assert!(line.starts_with("ready"), "{line:?}");
        process.child.kill().expect("it runs");
    }

    /// Waits until every process has ended; what each said, null for one that was killed.
    pub(crate) fn finish(mut self) -> Vec<Value> {
        let mut outputs = Vec::new();
        for index in 0..self.processes.len() {
            // Their output is far smaller than a pipe holds.
            while self.processes[index]
                .child
                .try_wait()
                .expect("a child")
                .is_none()
            {
                self.check_time();
                thread::sleep(Duration::from_millis(20));
            }
            let mut text = String::new();
            self.processes[index]
                .stdout
                .read_to_string(&mut text)
                .expect("text");
            outputs.push(serde_json::from_str(text.trim()).unwrap_or(Value::Null));
        }
        outputs
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }
}
