//! How a world of processes comes together: rank 0's listener, and the handshake of those that knock.

use std::{
    io::{self, Read, Write},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    ConnectError, Server,
    frames::{self, Answer, Hello, MAX_HELLO, OPENING_LEN, Refusal, VERSION},
};

/// How long a process that knocks may take to say who it is.
const PATIENCE: Duration = Duration::from_secs(10);
/// How many, besides the ranks, may not have said so at once.
const MOST_UNHEARD: usize = 64;
/// How often rank 0 looks for who knocks, before and after the world has started.
const LOOK: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(50)];

/// A place where rank 0 listens.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: TcpListener,
    /// As the others know it.
    address: String,
}

impl Listener {
    /// Listens at a port, 0 for any that is free. On the loopback interface where `host` is that, otherwise on all: the name by
    /// which other hosts know this one may resolve to something else here.
    pub(crate) fn bind(host: &str, port: u16) -> Result<Self, ConnectError> {
        let address = format!("{host}:{port}");
        let failed = |error: io::Error| ConnectError::Listen {
            address: address.clone(),
            reason: error.to_string(),
        };
        // A name that does not resolve yet, where the others look for it, says nothing of where to listen here.
        let found = (host, port).to_socket_addrs().inspect_err(|error| {
            tracing::warn!(host, %error, "rank 0's own name does not resolve here");
        });
        let found: Vec<SocketAddr> = found.into_iter().flatten().collect();
        let literal = host == "localhost" || host.parse::<std::net::IpAddr>().is_ok();
        let v6 = !found.is_empty() && found.iter().all(SocketAddr::is_ipv6);
        let at: SocketAddr = match found.iter().find(|at| at.is_ipv4() || v6) {
            Some(at) if literal && at.ip().is_loopback() => *at,
            _ if v6 => (Ipv6Addr::UNSPECIFIED, port).into(),
            _ => (Ipv4Addr::UNSPECIFIED, port).into(),
        };
        let socket = TcpListener::bind(at).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        let port = socket.local_addr().map_err(failed)?.port();
        Ok(Self {
            socket,
            address: format!("{host}:{port}"),
        })
    }

    pub(crate) fn port(&self) -> u16 {
        self.socket.local_addr().map_or(0, |at| at.port())
    }

    /// Waits until every other rank has come, and starts the world.
    pub(crate) fn welcome(
        self,
        world_size: usize,
        job: &str,
        deadline: Duration,
    ) -> Result<Server, ConnectError> {
        let door = Arc::new(Door {
            world_size,
            job: job.to_owned(),
            deadline,
            seats: Mutex::new(Seats {
                taken: (0..world_size).map(|_| None).collect(),
                refused: Vec::new(),
                open: true,
                started: false,
            }),
            came: Condvar::new(),
            num_unheard: AtomicUsize::new(0),
        });
        let (socket, address, inside) = (self.socket, self.address, door.clone());
        thread::spawn(move || inside.keep(&socket));
        let (start, mut seats) = (Instant::now(), door.lock());
        while seats.missing().next().is_some() {
            let left = deadline.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(door.give_up(seats, address, start.elapsed()));
            }
            seats = door
                .came
                .wait_timeout(seats, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        seats.started = true;
        let connections = seats.taken.iter_mut().map(Option::take).collect();
        drop(seats);
        Ok(Server::start(connections, deadline, door))
    }
}

/// Where processes knock. It stays for as long as the world does, so that who comes too late is told so.
#[derive(Debug)]
pub(super) struct Door {
    world_size: usize,
    job: String,
    deadline: Duration,
    seats: Mutex<Seats>,
    came: Condvar,
    /// Connections that have not said who they are.
    num_unheard: AtomicUsize,
}

#[derive(Debug)]
struct Seats {
    /// By rank; empty again once the world has started.
    taken: Vec<Option<TcpStream>>,
    refused: Vec<String>,
    open: bool,
    started: bool,
}

impl Seats {
    fn missing(&self) -> impl Iterator<Item = usize> {
        let empty = |(rank, seat): (usize, &Option<_>)| seat.is_none().then_some(rank);
        self.taken.iter().enumerate().skip(1).filter_map(empty)
    }
}

impl Door {
    fn lock(&self) -> MutexGuard<'_, Seats> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn close(&self) {
        self.lock().open = false;
    }

    /// Looks who knocks until the door is closed.
    fn keep(self: Arc<Self>, socket: &TcpListener) {
        loop {
            let look = {
                let seats = self.lock();
                if !seats.open {
                    return;
                }
                LOOK[usize::from(seats.started)]
            };
            match socket.accept() {
                Ok((stream, from)) => self.clone().take_in(stream, from),
                Err(_) => thread::sleep(look),
            }
        }
    }

    /// Hears who knocks in a thread of its own, so that one who says nothing holds up nobody. Where too many have said nothing yet, this one is
    /// let go; a rank comes again.
    fn take_in(self: Arc<Self>, stream: TcpStream, from: SocketAddr) {
        let most = MOST_UNHEARD + self.world_size;
        let unheard = Unheard::new(self);
        if unheard.0.num_unheard.load(Ordering::Acquire) > most {
            tracing::warn!(%from, most, "let go a connection: too many have not said who they are");
            return;
        }
        let hear = move || {
            if let Err(error) = unheard.0.hear(stream) {
                tracing::warn!(%from, %error, "let go a connection that is no rank");
            }
        };
        if let Err(error) = thread::Builder::new().name("door".into()).spawn(hear) {
            tracing::warn!(%from, %error, "let go a connection");
        }
    }

    fn hear(&self, mut stream: TcpStream) -> io::Result<()> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(self.deadline))?;
        stream.write_all(&frames::opening())?;
        let mut in_time = InTime {
            stream: &stream,
            end: Instant::now() + self.deadline.min(PATIENCE),
        };
        let mut opening = [0; OPENING_LEN];
        in_time.read_exact(&mut opening)?;
        match frames::version_of(opening) {
            Some(VERSION) => {}
            Some(other) => {
                let reason = format!("expected protocol version {VERSION}, got {other}");
                self.lock().refused.push(reason.clone());
                return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
            }
            None => {
                let reason = format!("expected the opening of a rank, got {:?}", shown(&opening));
                return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
            }
        }
        let hello: Hello = frames::read(&mut in_time, MAX_HELLO)?;
        let mut seats = self.lock();
        if !(seats.open || seats.started) {
            drop(seats);
            let reason = "rank 0 did not wait any longer".to_owned();
            return frames::write(&mut stream, &Answer::Refused(Refusal::GaveUp { reason }));
        }
        if let Some(refusal) = self.refusal(&seats, &hello) {
            let who = format!("rank {} ({refusal})", hello.rank);
            tracing::warn!(%who, "refused a process");
            seats.refused.push(who);
            drop(seats);
            return frames::write(&mut stream, &Answer::Refused(refusal));
        }
        seats.taken[hello.rank] = Some(stream);
        self.came.notify_all();
        Ok(())
    }

    fn refusal(&self, seats: &Seats, hello: &Hello) -> Option<Refusal> {
        let (expected, rank) = (self.world_size, hello.rank);
        if hello.job != self.job {
            return Some(Refusal::Job {
                expected: self.job.clone(),
                got: hello.job.clone(),
            });
        }
        if hello.world_size != expected {
            let got = hello.world_size;
            return Some(Refusal::WorldSize { expected, got });
        }
        if rank >= expected {
            return Some(Refusal::Rank {
                expected,
                got: rank,
            });
        }
        let there = seats.taken[rank].as_ref().is_some_and(is_alive);
        (seats.started || rank == 0 || there).then_some(Refusal::Taken { rank })
    }

    /// Tells those who have come that the world will not start.
    fn give_up(
        &self,
        mut seats: MutexGuard<'_, Seats>,
        address: String,
        waited: Duration,
    ) -> ConnectError {
        seats.open = false;
        let missing: Vec<usize> = seats.missing().collect();
        let refusal = Refusal::Missing {
            missing: missing.clone(),
            waited,
        };
        for mut stream in seats.taken.iter_mut().filter_map(Option::take) {
            // Who is gone needs no answer.
            let _ = frames::write(&mut stream, &Answer::Refused(refusal.clone()));
        }
        ConnectError::Missing {
            address,
            missing,
            waited,
            refused: std::mem::take(&mut seats.refused),
        }
    }
}

/// Whether a rank that came earlier is still there: a process that was started again may take its place.
fn is_alive(stream: &TcpStream) -> bool {
    let blocking = |on: bool| stream.set_nonblocking(!on).is_ok();
    if !blocking(false) {
        return false;
    }
    let ended = match stream.peek(&mut [0]) {
        Ok(len) => len == 0,
        Err(error) => error.kind() != io::ErrorKind::WouldBlock,
    };
    blocking(true) && !ended
}

/// Counts one who has not said who it is yet.
struct Unheard(Arc<Door>);

impl Unheard {
    fn new(door: Arc<Door>) -> Self {
        door.num_unheard.fetch_add(1, Ordering::AcqRel);
        Self(door)
    }
}

impl Drop for Unheard {
    fn drop(&mut self) {
        self.0.num_unheard.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What is read until some moment, however little comes at a time.
struct InTime<'a> {
    stream: &'a TcpStream,
    end: Instant,
}

impl Read for InTime<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        let mut stream = self.stream;
        stream.read(to)
    }
}

/// Bytes for people.
pub(super) fn shown(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
