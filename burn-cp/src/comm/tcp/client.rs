//! Any other rank's side: a connection to rank 0.

use std::{
    io::{self, Write},
    net::{Shutdown, TcpStream},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use super::{
    ConnectError, GRACE,
    frames::{self, Answer, Blob, Group, Hello, MAX_FRAME, Refusal, Request, why_lost},
    pulse,
    reach::{Handshake, reach, shake_hands},
    server::too_large,
};
use crate::comm::{
    CommError, FailureCause, RankFailure, Signature,
    error::SentCause,
    hub::{Attendance, MeetingKey},
};

/// How long a rank waits before it knocks again where nobody spoke.
const AGAIN: Duration = Duration::from_millis(100);
/// What may be told instead of a welcome: all ranks that are missing, of any world.
const MAX_FIRST_ANSWER: usize = 1 << 20;

/// The control plane in a process that is not rank 0.
#[derive(Debug)]
pub(crate) struct Client {
    rank: usize,
    world_size: usize,
    shared: Arc<Shared>,
    /// One request at a time: the answers have no names.
    asking: Mutex<()>,
}

#[derive(Debug)]
struct Shared {
    stream: TcpStream,
    deadline: Duration,
    writing: Mutex<()>,
    inbox: Mutex<Inbox>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Inbox {
    answer: Option<Result<Vec<Blob>, CommError>>,
    failure: Option<RankFailure>,
    /// All ranks have ended.
    finished: bool,
    /// Nothing more will come.
    closed: bool,
}

impl Client {
    /// Connects to rank 0 and waits until all ranks have come.
    pub(crate) fn connect(
        (host, port): (&str, u16),
        (rank, world_size): (usize, usize),
        job: &str,
        deadline: Duration,
    ) -> Result<Self, ConnectError> {
        let address = format!("{host}:{port}");
        let start = Instant::now();
        let unreachable = |error: io::Error| ConnectError::Unreachable {
            address: address.clone(),
            waited: start.elapsed(),
            reason: why_lost(&error),
        };
        let hello = Hello {
            rank,
            world_size,
            job: job.to_owned(),
        };
        let mut stream = loop {
            let left = deadline.saturating_sub(start.elapsed());
            let mut stream = reach(host, port, (start, deadline))?;
            match shake_hands(&mut stream, &address, deadline, &hello) {
                Ok(()) => break stream,
                // What forwards connections takes them before rank 0 is there.
                Err(Handshake::Closed(_)) if !left.is_zero() => thread::sleep(AGAIN.min(left)),
                Err(Handshake::Closed(error) | Handshake::Io(error)) => {
                    return Err(unreachable(error));
                }
                Err(Handshake::Foreign(error)) => return Err(error),
            }
        };
        // Rank 0 waits for the others up to its deadline, which began earlier or later than this one.
        let patience = deadline.saturating_mul(2).saturating_add(GRACE);
        stream
            .set_read_timeout(Some(patience))
            .map_err(unreachable)?;
        let deadline = match frames::read(&mut stream, MAX_FIRST_ANSWER).map_err(unreachable)? {
            Answer::Welcome { deadline } => deadline,
            answer => {
                let refusal = match answer {
                    Answer::Refused(refusal) => refusal,
                    other => Refusal::GaveUp {
                        reason: format!("{other:?} instead of a welcome"),
                    },
                };
                return Err(ConnectError::Refused {
                    address,
                    rank,
                    refusal,
                });
            }
        };
        stream
            .set_read_timeout(Some(deadline))
            .map_err(unreachable)?;
        stream
            .set_write_timeout(Some(deadline))
            .map_err(unreachable)?;
        Ok(Self::start(stream, rank, world_size, deadline))
    }

    fn start(stream: TcpStream, rank: usize, world_size: usize, deadline: Duration) -> Self {
        let shared = Arc::new(Shared {
            stream,
            deadline,
            writing: Mutex::default(),
            inbox: Mutex::default(),
            changed: Condvar::new(),
        });
        let at = shared.clone();
        thread::spawn(move || at.listen());
        let at = shared.clone();
        thread::spawn(move || at.show_life());
        Self {
            rank,
            world_size,
            shared,
            asking: Mutex::default(),
        }
    }

    pub(crate) fn world_size(&self) -> usize {
        self.world_size
    }

    pub(crate) fn deadline(&self) -> Duration {
        self.shared.deadline
    }

    pub(crate) fn failure(&self) -> Option<RankFailure> {
        self.shared.lock().failure.clone()
    }

    pub(crate) fn meet(
        &self,
        key: &MeetingKey,
        attendance: &Attendance<'_>,
        signature: Signature,
        bytes: Vec<u8>,
    ) -> Result<Vec<Arc<Vec<u8>>>, CommError> {
        let request = Request::Meet {
            key: key.clone(),
            group: group(attendance),
            signature,
            parcel: Blob(bytes),
        };
        let parcels = self.ask(&request)?;
        Ok(parcels
            .into_iter()
            .map(|Blob(bytes)| Arc::new(bytes))
            .collect())
    }

    pub(crate) fn diagnose(
        &self,
        attendance: &Attendance<'_>,
        key: &MeetingKey,
        waited: Duration,
    ) -> CommError {
        let request = Request::Diagnose {
            key: key.clone(),
            group: group(attendance),
            waited,
        };
        self.ask(&request)
            .err()
            .unwrap_or_else(|| CommError::Timeout {
                op: format!("#{} of group {}", key.number, key.group),
                missing: attendance.ranks.to_vec(),
                waited,
                last_seen: None,
            })
    }

    pub(crate) fn record(&self, key: &MeetingKey, signature: Signature, num_ranks: usize) {
        let key = key.clone();
        self.tell(&Request::Record {
            key,
            signature,
            num_ranks,
        });
    }

    pub(crate) fn fail(&self, rank: usize, op: Option<String>, cause: &FailureCause) {
        let cause: SentCause = cause.into();
        self.tell(&Request::Fail { rank, op, cause });
    }

    /// This rank's program has ended, badly if there is a cause. Waits until all have ended, or until rank 0 had time to hear of a
    /// failure; the first failure of the world.
    pub(crate) fn end(&self, cause: Option<&FailureCause>) -> Option<RankFailure> {
        let cause = cause.map(SentCause::from);
        self.tell(&Request::End { cause });
        let mut inbox = self.shared.lock();
        let mut heard: Option<Instant> = None;
        while !(inbox.finished || inbox.closed) {
            if inbox.failure.is_some() {
                let heard = *heard.get_or_insert_with(Instant::now);
                if heard.elapsed() >= GRACE {
                    break;
                }
            }
            inbox = self.shared.wait(inbox, GRACE / 4);
        }
        let failure = inbox.failure.clone();
        drop(inbox);
        self.shared.close();
        failure
    }

    /// Sends what is not answered. A connection that is lost is the failure of the next wait.
    fn tell(&self, request: &Request) {
        if let Err(error) = self.shared.send(request) {
            self.shared.lose(&error);
        }
    }

    fn ask(&self, request: &Request) -> Result<Vec<Blob>, CommError> {
        let _asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        let start = Instant::now();
        match self.shared.send(request) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                let error = too_large(&error);
                self.fail(self.rank, None, &FailureCause::Comm(error.clone()));
                return Err(error);
            }
            Err(error) => self.shared.lose(&error),
        }
        let mut inbox = self.shared.lock();
        loop {
            // An answer counts, whatever has happened since: so all ranks of a meeting see the same outcome.
            if let Some(answer) = inbox.answer.take() {
                return answer;
            }
            if inbox.closed {
                let failure = inbox.failure.as_ref().map(RankFailure::as_peer_failure);
                return Err(failure.unwrap_or_else(|| CommError::PeerLeft {
                    op: "the control plane".to_owned(),
                    rank: 0,
                }));
            }
            // Rank 0 answers by its deadline; that it is there, who listens here knows.
            let patience = self.shared.deadline.saturating_mul(2);
            let patience = patience.saturating_add(GRACE);
            if start.elapsed() > patience {
                drop(inbox);
                self.shared.lose(&io::ErrorKind::TimedOut.into());
                inbox = self.shared.lock();
                continue;
            }
            inbox = self.shared.wait(inbox, self.shared.deadline);
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, inbox: MutexGuard<'a, Inbox>, timeout: Duration) -> MutexGuard<'a, Inbox> {
        self.changed
            .wait_timeout(inbox, timeout)
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }

    fn send(&self, request: &Request) -> io::Result<()> {
        let bytes = frames::encode(request)?;
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        (&self.stream).write_all(&bytes)
    }

    fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Rank 0 cannot be heard any more: its failure, unless another one, or the world's end, came first.
    fn lose(&self, error: &io::Error) {
        let mut inbox = self.lock();
        if !(inbox.closed || inbox.finished) {
            inbox.failure.get_or_insert_with(|| RankFailure {
                rank: 0,
                op: "the control plane".to_owned(),
                cause: FailureCause::Reported(why_lost(error)),
            });
        }
        let lost = inbox.failure.clone().filter(|_| !inbox.closed);
        drop(inbox);
        if let Some(failure) = lost {
            self.tell_why(&failure);
        }
        self.close();
    }

    /// Tells rank 0, which may be there all the same, why this rank leaves, if that can be done at once.
    fn tell_why(&self, failure: &RankFailure) {
        let Ok(_writing) = self.writing.try_lock() else {
            return;
        };
        let request = Request::Fail {
            rank: failure.rank,
            op: Some(failure.op.clone()),
            cause: (&failure.cause).into(),
        };
        if let Ok(bytes) = frames::encode(&request) {
            let _ = self.stream.set_write_timeout(Some(GRACE));
            let _ = (&self.stream).write_all(&bytes);
        }
    }

    /// Reads what rank 0 sends until the connection ends.
    fn listen(&self) {
        loop {
            let answer = match frames::read(&self.stream, MAX_FRAME) {
                Ok(answer) => answer,
                Err(error) => return self.lose(&error),
            };
            let mut inbox = self.lock();
            match answer {
                Answer::Parcels(parcels) => inbox.answer = Some(Ok(parcels)),
                Answer::Error(error) => inbox.answer = Some(Err(error)),
                Answer::Failed(failure) => inbox.failure = Some(failure.into()),
                Answer::Finished(failure) => {
                    inbox.failure = failure.map(Into::into);
                    inbox.finished = true;
                }
                Answer::Welcome { .. } | Answer::Refused(_) | Answer::Alive => continue,
            }
            drop(inbox);
            self.changed.notify_all();
        }
    }

    fn show_life(&self) {
        let (mut inbox, pulse) = (self.lock(), pulse(self.deadline));
        let mut last = Instant::now();
        while !inbox.closed {
            if last.elapsed() >= pulse {
                drop(inbox);
                last = Instant::now();
                if self.send(&Request::Alive).is_err() {
                    return;
                }
                inbox = self.lock();
            }
            inbox = self.wait(inbox, pulse);
        }
    }
}

fn group(attendance: &Attendance<'_>) -> Group {
    Group {
        ranks: attendance.ranks.to_vec(),
        index: attendance.index,
    }
}
