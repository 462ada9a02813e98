//! How a rank finds rank 0.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream, ToSocketAddrs},
    thread,
    time::{Duration, Instant},
};

use super::{
    ConnectError,
    door::shown,
    frames::{self, Hello, OPENING_LEN, VERSION},
};

/// The waits between two attempts to reach rank 0: the first, and the longest.
const BACKOFF: [Duration; 2] = [Duration::from_millis(10), Duration::from_secs(1)];

/// How long an address is tried that is not the only one.
const ONE_ADDRESS: Duration = Duration::from_secs(5);

/// A connection to whatever listens there, tried until the deadline, which counts from `start`.
pub(super) fn reach(
    host: &str,
    port: u16,
    (start, deadline): (Instant, Duration),
) -> Result<TcpStream, ConnectError> {
    let mut pause = BACKOFF[0];
    loop {
        let left = deadline.saturating_sub(start.elapsed());
        let attempt = (host, port).to_socket_addrs().and_then(|found| {
            let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
            let found: Vec<SocketAddr> = found.collect();
            for (i, at) in found.iter().copied().enumerate() {
                // One of several may drop what is sent to it.
                let left = deadline.saturating_sub(start.elapsed());
                let share = left / u32::try_from(found.len() - i).unwrap_or(u32::MAX);
                let patience = match found.len() {
                    1 => left,
                    _ => share.min(ONE_ADDRESS),
                };
                match TcpStream::connect_timeout(&at, patience.max(BACKOFF[0])) {
                    Ok(stream) if is_itself(&stream, at) => {
                        last = io::ErrorKind::ConnectionRefused.into();
                    }
                    Ok(stream) => return Ok(stream),
                    Err(error) => last = error,
                }
            }
            Err(last)
        });
        match attempt {
            Ok(stream) => return Ok(stream),
            Err(error) if left.is_zero() => {
                return Err(ConnectError::Unreachable {
                    address: format!("{host}:{port}"),
                    waited: start.elapsed(),
                    reason: error.to_string(),
                });
            }
            Err(_) => thread::sleep(pause.min(left)),
        }
        pause = (pause * 2).min(BACKOFF[1]);
    }
}

/// Linux connects a socket with itself where the port that it looks for is free and happens to be the one that it was given.
fn is_itself(stream: &TcpStream, at: SocketAddr) -> bool {
    stream.local_addr().is_ok_and(|local| local == at)
}

/// How a handshake ends badly.
pub(super) enum Handshake {
    /// The connection ended before anything was said.
    Closed(io::Error),
    Io(io::Error),
    Foreign(ConnectError),
}

impl From<io::Error> for Handshake {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Makes sure that rank 0 is what answers, and says who this is.
pub(super) fn shake_hands(
    stream: &mut TcpStream,
    address: &str,
    deadline: Duration,
    hello: &Hello,
) -> Result<(), Handshake> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(deadline))?;
    stream.set_write_timeout(Some(deadline))?;
    stream
        .write_all(&frames::opening())
        .map_err(Handshake::Closed)?;
    let mut opening = [0; OPENING_LEN];
    let foreign = |got: String| {
        Handshake::Foreign(ConnectError::Foreign {
            address: address.to_owned(),
            expected: format!("the opening of burn-cp's protocol, version {VERSION}"),
            got,
        })
    };
    match stream.read_exact(&mut opening) {
        Ok(()) => {}
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
            ) =>
        {
            return Err(foreign("nothing".to_owned()));
        }
        Err(error) => return Err(Handshake::Closed(error)),
    }
    match frames::version_of(opening) {
        Some(VERSION) => {}
        Some(other) => return Err(foreign(format!("version {other}"))),
        None => return Err(foreign(format!("{:?}", shown(&opening)))),
    }
    frames::write(stream, hello).map_err(Into::into)
}
