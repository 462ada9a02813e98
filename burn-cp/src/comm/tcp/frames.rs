//! What travels over a connection: the opening bytes, and frames of a length (four bytes, little-endian) and that many bytes
//! in postcard's encoding.

use std::{
    io::{self, Read, Write},
    time::Duration,
};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::comm::{
    CommError, Signature,
    error::{SentCause, SentFailure},
    hub::MeetingKey,
};

/// The first bytes that either side sends.
pub(super) const MAGIC: [u8; 8] = *b"burn-cp\n";
/// Of what follows them.
pub(super) const VERSION: u16 = 1;
/// Both, as they are sent.
pub(super) const OPENING_LEN: usize = MAGIC.len() + 2;

/// The largest frame of a rank that has not been welcomed yet.
pub(super) const MAX_HELLO: usize = 4096;
/// The largest frame. Host messages are small; a batch that one rank has read may take some.
pub(super) const MAX_FRAME: usize = 1 << 30;

pub(super) fn opening() -> [u8; OPENING_LEN] {
    let mut bytes = [0; OPENING_LEN];
    bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
    bytes[MAGIC.len()..].copy_from_slice(&VERSION.to_le_bytes());
    bytes
}

/// The version of the other side, if it is one of ours.
pub(super) fn version_of(opening: [u8; OPENING_LEN]) -> Option<u16> {
    let (magic, version) = opening.split_at(MAGIC.len());
    (magic == MAGIC).then(|| u16::from_le_bytes([version[0], version[1]]))
}

/// What a rank says of itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) job: String,
}

/// Why rank 0 refuses a process.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Refusal {
    /// It was told another number of ranks.
    #[error("expected a world of {expected} ranks, got one of {got}")]
    WorldSize {
        /// Ranks of rank 0's world.
        expected: usize,
        /// Ranks of the refused process's world.
        got: usize,
    },
    /// It has a rank that the world does not have.
    #[error("expected a rank below {expected}, got {got}")]
    Rank {
        /// Number of ranks.
        expected: usize,
        /// The rank.
        got: usize,
    },
    /// Another process has this rank.
    #[error("another process is rank {rank} already")]
    Taken {
        /// The rank.
        rank: usize,
    },
    /// It belongs to another job.
    #[error("expected a process of job {expected:?}, got one of {got:?}")]
    Job {
        /// Rank 0's job.
        expected: String,
        /// The refused process's job.
        got: String,
    },
    /// The world cannot start because others have not come.
    #[error("after {waited:?}, ranks {missing:?} had not come")]
    Missing {
        /// Ranks that did not come.
        missing: Vec<usize>,
        /// How long rank 0 waited.
        waited: Duration,
    },
    /// Rank 0 could not go on.
    #[error("rank 0 gave up: {reason}")]
    GaveUp {
        /// Why.
        reason: String,
    },
}

/// The group of an operation: its ranks, and which of them the sender is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Group {
    pub(super) ranks: Vec<usize>,
    pub(super) index: usize,
}

/// From a rank to rank 0.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// Leave a parcel, wait for the others. Answered by [`Answer::Parcels`] or [`Answer::Error`].
    Meet {
        key: MeetingKey,
        group: Group,
        signature: Signature,
        parcel: Blob,
    },
    /// Tell why an operation does not end. Answered by [`Answer::Error`].
    Diagnose {
        key: MeetingKey,
        group: Group,
        waited: Duration,
    },
    /// An operation was started. Not answered.
    Record {
        key: MeetingKey,
        signature: Signature,
        num_ranks: usize,
    },
    /// A rank has failed. Not answered.
    Fail {
        rank: usize,
        op: Option<String>,
        cause: SentCause,
    },
    /// The rank's program has ended, badly if there is a cause. Answered by [`Answer::Finished`] when all have ended.
    End { cause: Option<SentCause> },
    /// Sign of life.
    Alive,
}

/// From rank 0 to a rank.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// All ranks have come. From here on the deadline is rank 0's.
    Welcome {
        deadline: Duration,
    },
    Refused(Refusal),
    /// One parcel per rank of the group.
    Parcels(Vec<Blob>),
    Error(CommError),
    /// The world has failed.
    Failed(SentFailure),
    /// All ranks have ended.
    Finished(Option<SentFailure>),
    /// Sign of life.
    Alive,
}

/// Bytes that are encoded as a whole, not one by one.
#[derive(Debug, Clone)]
pub(super) struct Blob(pub(super) Vec<u8>);

impl Serialize for Blob {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Blob {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl de::Visitor<'_> for Bytes {
            type Value = Blob;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("bytes")
            }

            fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Blob, E> {
                Ok(Blob(bytes.to_vec()))
            }

            fn visit_byte_buf<E: de::Error>(self, bytes: Vec<u8>) -> Result<Blob, E> {
                Ok(Blob(bytes))
            }
        }
        from.deserialize_byte_buf(Bytes)
    }
}

/// The bytes of a frame, its length in front.
pub(super) fn encode<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
    let mut bytes = postcard::to_extend(message, vec![0_u8; 4]).map_err(io::Error::other)?;
    let len = bytes.len() - 4;
    if len > MAX_FRAME {
        let reason = format!("a host message of {len} bytes; at most {MAX_FRAME} can be sent");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    }
    #[allow(clippy::cast_possible_truncation, reason = "checked above")]
    bytes[..4].copy_from_slice(&(len as u32).to_le_bytes());
    Ok(bytes)
}

/// Writes a frame in one piece.
pub(super) fn write<T: Serialize>(mut to: impl Write, message: &T) -> io::Result<()> {
    to.write_all(&encode(message)?)
}

/// Reads a frame of at most `limit` bytes.
pub(super) fn read<T: de::DeserializeOwned>(mut from: impl Read, limit: usize) -> io::Result<T> {
    let mut len = [0; 4];
    from.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > limit {
        let reason = format!("expected a frame of at most {limit} bytes, got one of {len}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    let mut bytes = vec![0; len];
    from.read_exact(&mut bytes)?;
    postcard::from_bytes(&bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Why a connection has ended, for people.
pub(super) fn why_lost(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::ConnectionAborted
        | io::ErrorKind::BrokenPipe => "its process ended without a word".to_owned(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            "nothing was heard of it for a whole deadline".to_owned()
        }
        _ => format!("its connection broke: {error}"),
    }
}
