//! Rank 0's side: the table, and for every other rank a connection and those who stand in for it.

use std::{
    net::{Shutdown, TcpStream},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use super::{
    GRACE,
    door::Door,
    frames::{self, Answer, Blob, Group, MAX_FRAME, Request, why_lost},
    pulse,
};
use crate::comm::{
    CommError, FailureCause, RankFailure,
    error::panic_message,
    hub::{Attendance, Hub, MeetingKey},
};

/// The control plane in rank 0's process.
#[derive(Debug)]
pub(crate) struct Server {
    hub: Arc<Hub>,
    shared: Arc<Shared>,
    door: Arc<Door>,
}

#[derive(Debug)]
struct Shared {
    connections: Vec<Arc<Connection>>,
    open: Mutex<Open>,
    closed: Condvar,
    /// Connections end because rank 0 closes them.
    closing: AtomicBool,
}

/// Numbers of connections.
#[derive(Debug)]
struct Open {
    /// Still read from.
    read: usize,
    /// Not told of the world's end yet.
    told: usize,
}

impl Shared {
    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, down: impl FnOnce(&mut Open)) {
        down(&mut self.open());
        self.closed.notify_all();
    }

    /// Waits for as long at most.
    fn wait_until(&self, limit: Duration, done: impl Fn(&Open) -> bool) {
        drop((self.closed).wait_timeout_while(self.open(), limit, |open| !done(open)));
    }
}

/// One rank's connection. Whole frames are written under the lock.
#[derive(Debug)]
struct Connection {
    rank: usize,
    stream: TcpStream,
    writing: Mutex<()>,
}

impl Connection {
    fn send(&self, answer: &Answer) -> std::io::Result<()> {
        let bytes = frames::encode(answer)?;
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        std::io::Write::write_all(&mut &self.stream, &bytes)
    }
}

impl Server {
    /// Starts a world; `connections` by rank, none for rank 0.
    pub(super) fn start(
        connections: Vec<Option<TcpStream>>,
        deadline: Duration,
        door: Arc<Door>,
    ) -> Self {
        let hub = Hub::new(connections.len(), deadline);
        let connections: Vec<Arc<Connection>> = (connections.into_iter().enumerate())
            .filter_map(|(rank, stream)| {
                Some(Arc::new(Connection {
                    rank,
                    stream: stream?,
                    writing: Mutex::default(),
                }))
            })
            .collect();
        let shared = Arc::new(Shared {
            open: Mutex::new(Open {
                read: connections.len(),
                told: connections.len(),
            }),
            closed: Condvar::new(),
            closing: AtomicBool::new(false),
            connections,
        });
        for connection in &shared.connections {
            let _ = connection.stream.set_read_timeout(Some(deadline));
            // A rank that is gone is found by who reads from it.
            let _ = connection.send(&Answer::Welcome { deadline });
            let (requests, queue) = mpsc::channel();
            let (at, table, all) = (connection.clone(), hub.clone(), shared.clone());
            thread::spawn(move || {
                listen(&at, &table, &requests, &all.closing);
                all.count(|open| open.read -= 1);
            });
            let (at, table) = (connection.clone(), hub.clone());
            thread::spawn(move || stand_in(&at, &table, &queue));
            let (at, table, all) = (connection.clone(), hub.clone(), shared.clone());
            thread::spawn(move || {
                proclaim(&at, &table);
                all.count(|open| open.told -= 1);
            });
        }
        Self { hub, shared, door }
    }

    pub(crate) fn hub(&self) -> &Arc<Hub> {
        &self.hub
    }

    /// Rank 0's program has ended, badly if there is a cause. Waits until all have ended, or until the others had time to hear of a
    /// failure; the first failure of the world.
    pub(crate) fn end(&self, cause: Option<FailureCause>) -> Option<RankFailure> {
        if let Some(cause) = cause {
            self.hub.fail(0, None, cause);
        }
        self.hub.end(0);
        let all = |ended: &[bool]| ended.iter().all(|ended| *ended);
        let failure = loop {
            match self.hub.wait_settled(self.hub.deadline(), all) {
                (None, false) => tracing::warn!("waits for ranks whose programs have not ended"),
                (failure, _) => break failure,
            }
        };
        self.hub.wait_ended(GRACE, all);
        if failure.is_none() {
            // A rank that is not told of the end takes the end of its connection for this rank's.
            let patience = self.hub.deadline();
            self.shared.wait_until(patience, |open| open.told == 0);
        }
        // A socket that is closed with something unread takes back what it has sent.
        self.shared.wait_until(GRACE, |open| open.read == 0);
        self.close();
        failure
    }

    fn close(&self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        self.door.close();
        for connection in &self.shared.connections {
            let _ = connection.stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.close();
    }
}

/// Reads what a rank sends until its connection ends.
fn listen(
    connection: &Connection,
    hub: &Hub,
    requests: &mpsc::Sender<Request>,
    closing: &AtomicBool,
) {
    let rank = connection.rank;
    let mut ended = false;
    loop {
        match frames::read(&connection.stream, MAX_FRAME) {
            Ok(Request::Alive) => {}
            Ok(Request::Record {
                key,
                signature,
                num_ranks,
            }) => hub.record(rank, &key, signature, num_ranks),
            Ok(Request::Fail { rank, op, cause }) => hub.fail(rank, op, cause.into()),
            Ok(Request::End { cause }) => {
                if let Some(cause) = cause {
                    hub.fail(rank, None, cause.into());
                }
                hub.end(rank);
                ended = true;
            }
            // Its stand-in has gone only if this connection has ended.
            Ok(request) => drop(requests.send(request)),
            Err(error) => {
                if !ended && !closing.load(Ordering::SeqCst) {
                    hub.fail(rank, None, FailureCause::Reported(why_lost(&error)));
                    hub.end(rank);
                }
                return;
            }
        }
    }
}

/// Meets on a rank's behalf, one operation after the other.
fn stand_in(connection: &Connection, hub: &Hub, requests: &mpsc::Receiver<Request>) {
    for request in requests {
        let rank = connection.rank;
        // A rank that breaks the protocol panics in the table; here, too, it is that rank's failure.
        let answer = catch_unwind(AssertUnwindSafe(|| answer(rank, hub, request)));
        let answer = answer.unwrap_or_else(|payload| {
            let cause = FailureCause::Panic(panic_message(payload.as_ref()));
            hub.fail(rank, None, cause.clone());
            Answer::Error(CommError::PeerFailed {
                rank,
                op: "the control plane".to_owned(),
                cause: cause.to_string(),
            })
        });
        match connection.send(&answer) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => {
                let error = too_large(&error);
                hub.fail(rank, None, FailureCause::Comm(error.clone()));
                let _ = connection.send(&Answer::Error(error));
            }
            // Who reads from this connection finds out why.
            Err(_) => drop(connection.stream.shutdown(Shutdown::Both)),
        }
    }
}

/// The error of a message that is too large to be sent.
pub(super) fn too_large(error: &std::io::Error) -> CommError {
    CommError::Transport {
        group: "of the control plane".to_owned(),
        what: "a host message".to_owned(),
        reason: error.to_string(),
    }
}

fn answer(rank: usize, hub: &Hub, request: Request) -> Answer {
    let known = |group: &Group| {
        let within = group.ranks.iter().all(|rank| *rank < hub.world_size());
        within && group.ranks.get(group.index) == Some(&rank)
    };
    match request {
        Request::Meet {
            key,
            group,
            signature,
            parcel,
        } if known(&group) => {
            let attendance = attendance(&group);
            match hub.meet_bytes(&key, &attendance, signature, parcel.0) {
                Ok(parcels) => {
                    let blob = |parcel: Arc<Vec<u8>>| Blob(Arc::unwrap_or_clone(parcel));
                    Answer::Parcels(parcels.into_iter().map(blob).collect())
                }
                Err(error) => Answer::Error(error),
            }
        }
        Request::Diagnose { key, group, waited } if known(&group) => {
            Answer::Error(hub.diagnose(&attendance(&group), &key, waited))
        }
        Request::Meet { key, group, .. } | Request::Diagnose { key, group, .. } => {
            Answer::Error(stranger(rank, &key, &group))
        }
        // The others are answered by who reads them.
        _ => Answer::Alive,
    }
}

fn attendance(group: &Group) -> Attendance<'_> {
    Attendance {
        ranks: &group.ranks,
        index: group.index,
    }
}

fn stranger(rank: usize, key: &MeetingKey, group: &Group) -> CommError {
    CommError::Transport {
        group: key.group.to_string(),
        what: format!("messages of rank {rank}"),
        reason: format!("the group's ranks are {:?}", group.ranks),
    }
}

/// Tells a rank of the world's failure as soon as there is one, of its end, and until then that rank 0 is alive.
fn proclaim(connection: &Connection, hub: &Hub) {
    let (rank, pulse) = (connection.rank, pulse(hub.deadline()));
    let all = |ended: &[bool]| ended.iter().all(|ended| *ended);
    let failure = loop {
        match hub.wait_settled(pulse, all) {
            (Some(failure), _) => break failure,
            (None, true) => {
                let _ = connection.send(&Answer::Finished(None));
                return;
            }
            (None, false) => {
                if connection.send(&Answer::Alive).is_err() {
                    return;
                }
            }
        }
    };
    if connection.send(&Answer::Failed((&failure).into())).is_err() {
        return;
    }
    while !hub.wait_ended(pulse, |ended| ended[rank]) {
        if connection.send(&Answer::Alive).is_err() {
            return;
        }
    }
    let _ = connection.send(&Answer::Finished(Some((&failure).into())));
}
