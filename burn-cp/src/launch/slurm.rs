//! What Slurm's variables mean.

/// First of the ports that jobs are dealt, and their number: below those that systems give to outgoing connections.
const PORTS: (u16, u16) = (20_000, 12_000);

/// The port of a job's step. Jobs that run on one host at a time have ids close to each other, and so different ports.
pub(super) fn port(job: u64, step: u64) -> u16 {
    let place = (job % 1_000_000_007).wrapping_mul(31).wrapping_add(step) % u64::from(PORTS.1);
    #[allow(clippy::cast_possible_truncation, reason = "below PORTS.1")]
    let place = place as u16;
    PORTS.0 + place
}

/// The first host of a list in Slurm's notation: `node[01-04,7],other` -> `node01`.
pub(super) fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim();
    loop {
        let end = rest.find([',', '[', ']']).unwrap_or(rest.len());
        host.push_str(&rest[..end]);
        match rest[end..].chars().next() {
            None | Some(',') => break,
            Some('[') => {
                let close = end + rest[end..].find(']')?;
                let inside = &rest[end + 1..close];
                let first = inside.split([',', '-']).next()?;
                if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
                    return None;
                }
                host.push_str(first);
                rest = &rest[close + 1..];
            }
            Some(_) => return None,
        }
    }
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    (!host.is_empty() && host.chars().all(legal)).then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_host_of_a_list_is_found() {
        for (list, host) in [
            ("node1", "node1"),
            ("node1,node2", "node1"),
            ("node[01-04,7],other", "node01"),
            ("node[3,5-9]", "node3"),
            ("rack[2-3]-node[05-06].cluster", "rack2-node05.cluster"),
            (" a-b.c ", "a-b.c"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(host), "{list}");
        }
        for list in [
            "",
            ",",
            "node[",
            "node]",
            "node[]",
            "node[a-b]",
            "no de",
            "[,]",
        ] {
            assert_eq!(first_host(list), None, "{list}");
        }
    }

    #[test]
    fn neighbouring_jobs_and_steps_have_ports_of_their_own() {
        let mut ports = std::collections::BTreeSet::new();
        for job in 4_000_000..4_000_100 {
            for step in 0..20 {
                let port = port(job, step);
                assert!((20_000..32_000).contains(&port));
                assert!(ports.insert(port), "job {job}, step {step}");
            }
        }
        assert_eq!(port(u64::MAX, u64::MAX), port(u64::MAX, u64::MAX));
    }
}
