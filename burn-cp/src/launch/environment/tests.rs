//! Every scheme, every omission, and values that cannot be.

use super::*;

type Variables<'a> = &'a [(&'a str, &'a str)];

fn read(variables: Variables<'_>, mpi: bool) -> Result<Place, EnvironmentError> {
    let lookup = |name: &str| {
        let found = variables.iter().rev().find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    Place::read(lookup, mpi)
}

const TORCHRUN_SET: Variables<'static> = &[
    ("RANK", "3"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("MASTER_ADDR", "node0"),
    ("MASTER_PORT", "29500"),
];
const OPEN_MPI_SET: Variables<'static> = &[
    ("OMPI_COMM_WORLD_RANK", "2"),
    ("OMPI_COMM_WORLD_SIZE", "4"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
];
const SLURM_SET: Variables<'static> = &[
    ("SLURM_PROCID", "5"),
    ("SLURM_NTASKS", "6"),
    ("SLURM_LOCALID", "2"),
    ("SLURM_JOB_ID", "1234"),
    ("SLURM_STEP_ID", "7"),
    ("SLURM_JOB_NODELIST", "gpu[07-09]"),
];

fn with<'a>(base: Variables<'a>, more: Variables<'a>) -> Vec<(&'a str, &'a str)> {
    [base, more].concat()
}

fn without<'a>(base: Variables<'a>, name: &str) -> Vec<(&'a str, &'a str)> {
    let kept = base.iter().filter(|(known, _)| *known != name);
    kept.copied().collect()
}

fn address(host: &str, port: u16) -> Rendezvous {
    Rendezvous::Address {
        host: host.to_owned(),
        port,
    }
}

fn ranks(place: &Place) -> (usize, usize, usize) {
    (place.rank, place.world_size, place.local_rank)
}

#[test]
fn torchruns_variables_are_read() {
    let place = read(TORCHRUN_SET, false).unwrap();
    assert_eq!(ranks(&place), (3, 8, 1));
    assert_eq!(place.rendezvous, address("node0", 29500));
    assert_eq!(place.job, "");
    let more = with(
        TORCHRUN_SET,
        &[
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("TORCHELASTIC_RUN_ID", "abc"),
        ],
    );
    let place = read(&more, false).unwrap();
    assert_eq!(place.rendezvous, address("node0", 29501), "torchrun's own");
    assert_eq!(place.job, "torchrun abc");
}

#[test]
fn open_mpis_variables_are_read() {
    let place = read(OPEN_MPI_SET, true).unwrap();
    assert_eq!(ranks(&place), (2, 4, 0));
    assert_eq!(place.rendezvous, Rendezvous::ThroughMpi);
    let given = with(OPEN_MPI_SET, &[(ADDR, "10.0.0.1"), (PORT, "4000")]);
    for mpi in [false, true] {
        let place = read(&given, mpi).unwrap();
        assert_eq!(place.rendezvous, address("10.0.0.1", 4000));
    }
    let named = with(OPEN_MPI_SET, &[("PMIX_NAMESPACE", "17")]);
    assert_eq!(read(&named, true).unwrap().job, "Open MPI 17");
}

#[test]
fn slurms_variables_are_read() {
    let place = read(SLURM_SET, false).unwrap();
    assert_eq!(ranks(&place), (5, 6, 2));
    assert_eq!(
        place.rendezvous,
        address("gpu07", slurm::port(1234, 7)),
        "the first host of the job"
    );
    assert_eq!(place.job, "Slurm 1234.7");
    for (more, host) in [
        (("SLURM_STEP_NODELIST", "gpu08"), "gpu08"),
        ((ADDR, "head"), "head"),
    ] {
        let place = read(&with(SLURM_SET, &[more]), false).unwrap();
        assert_eq!(place.rendezvous, address(host, slurm::port(1234, 7)));
    }
    let place = read(&with(SLURM_SET, &[(PORT, "5000")]), false).unwrap();
    assert_eq!(place.rendezvous, address("gpu07", 5000));
    let mut lone = without(SLURM_SET, "SLURM_JOB_NODELIST");
    lone.push(("SLURM_LAUNCH_NODE_IPADDR", "10.1.2.3"));
    lone.retain(|(name, _)| *name != "SLURM_STEP_ID");
    let place = read(&lone, false).unwrap();
    assert_eq!(place.rendezvous, address("10.1.2.3", slurm::port(1234, 0)));
}

#[test]
fn a_world_of_one_needs_no_address() {
    let one = [
        with(
            OPEN_MPI_SET,
            &[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")],
        ),
        vec![
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "1"),
            ("SLURM_LOCALID", "0"),
        ],
    ];
    for variables in &one {
        assert_eq!(
            read(variables, false).unwrap().rendezvous,
            Rendezvous::Alone
        );
    }
}

/// mpirun in a script of Slurm's: the script's own variables say that each of its ranks is rank 0.
#[test]
fn the_innermost_launcher_counts() {
    let script = with(SLURM_SET, OPEN_MPI_SET);
    assert_eq!(read(&script, true).unwrap().world_size, 4);
    let all = with(&script, TORCHRUN_SET);
    assert_eq!(read(&all, true).unwrap().world_size, 8);
}

#[test]
fn an_environment_without_a_launcher_says_what_could_be_set() {
    let error = read(&[("PATH", "/bin")], true).unwrap_err();
    assert_eq!(error, EnvironmentError::Absent);
    for name in ["torchrun", "mpirun", "srun", "RANK", "MASTER_PORT"] {
        assert!(error.to_string().contains(name), "{error}");
    }
}

fn missing(variables: Variables<'_>, mpi: bool) -> (Scheme, Vec<&'static str>, String) {
    match read(variables, mpi).unwrap_err() {
        EnvironmentError::Missing {
            scheme,
            missing,
            found,
            hint,
        } => {
            let all = EnvironmentError::Missing {
                scheme,
                missing: missing.clone(),
                found,
                hint,
            };
            (scheme, missing, all.to_string())
        }
        other => panic!("{other}"),
    }
}

#[test]
fn every_variable_that_is_missing_is_named() {
    for (scheme, set, needed) in [
        (Scheme::Torchrun, TORCHRUN_SET, &TORCHRUN[..]),
        (Scheme::OpenMpi, OPEN_MPI_SET, &OPEN_MPI[..]),
        (
            Scheme::Slurm,
            SLURM_SET,
            &[SLURM[0], SLURM[1], SLURM[2], "SLURM_JOB_ID"],
        ),
        (Scheme::Slurm, SLURM_SET, &["SLURM_JOB_NODELIST"]),
    ] {
        for name in needed {
            let (whose, which, shown) = missing(&without(set, name), true);
            assert_eq!((whose, &which[..]), (scheme, &[*name][..]), "{shown}");
            assert!(
                shown.contains(name) && shown.contains(&scheme.to_string()),
                "{shown}"
            );
            // An empty value is none.
            let (_, which, _) = missing(&with(set, &[(name, " ")]), true);
            assert_eq!(which, [*name]);
        }
    }
    let (_, which, shown) = missing(&[("RANK", "0"), (PORT, "1")], true);
    assert_eq!(which, ["WORLD_SIZE", "LOCAL_RANK", ADDR]);
    assert!(shown.contains("RANK, MASTER_PORT are set"), "{shown}");
    for lone in ["LOCAL_RANK", ADDR, PORT] {
        let (scheme, which, _) = missing(&[(lone, "1")], true);
        assert_eq!((scheme, which.len()), (Scheme::Torchrun, 4), "{lone}");
    }
    let (scheme, which, shown) = missing(&[("SLURM_JOB_ID", "5")], true);
    assert_eq!((scheme, &which[..]), (Scheme::Slurm, &SLURM[..]));
    assert!(shown.contains("srun"), "{shown}");
}

#[test]
fn mpiruns_ranks_need_an_address_where_mpi_cannot_tell_it() {
    let (scheme, which, shown) = missing(OPEN_MPI_SET, false);
    assert_eq!((scheme, &which[..]), (Scheme::OpenMpi, &[ADDR, PORT][..]));
    assert!(shown.contains("feature `mpi`"), "{shown}");
    for (given, lacks) in [((ADDR, "here"), PORT), ((PORT, "80"), ADDR)] {
        for mpi in [false, true] {
            let (_, which, _) = missing(&with(OPEN_MPI_SET, &[given]), mpi);
            assert_eq!(which, [lacks]);
        }
    }
}

#[test]
fn values_that_cannot_be_are_refused_with_what_was_expected() {
    for (set, names) in [
        (TORCHRUN_SET, ["RANK", "WORLD_SIZE", "LOCAL_RANK"]),
        (OPEN_MPI_SET, OPEN_MPI),
        (SLURM_SET, SLURM),
    ] {
        for (index, name) in names.into_iter().enumerate() {
            let bad = if index == 1 { "0" } else { "99" };
            for value in ["two", "-1", "1.5", bad] {
                match read(&with(set, &[(name, value)]), true).unwrap_err() {
                    EnvironmentError::Value {
                        variable,
                        expected,
                        got,
                    } => {
                        assert_eq!((variable, &got[..]), (name, value));
                        assert!(expected.contains(if index == 1 { "at least 1" } else { "below" }));
                    }
                    other => panic!("{name}={value}: {other}"),
                }
            }
        }
    }
    for (set, name, value) in [
        (TORCHRUN_SET, PORT, "0"),
        (TORCHRUN_SET, PORT, "70000"),
        (SLURM_SET, PORT, "x"),
        (SLURM_SET, "SLURM_JOB_ID", "x"),
        (SLURM_SET, "SLURM_STEP_ID", "x"),
        (SLURM_SET, "SLURM_JOB_NODELIST", "gpu[x]"),
    ] {
        let error = read(&with(set, &[(name, value)]), true).unwrap_err();
        assert!(
            matches!(&error, EnvironmentError::Value { variable, .. } if *variable == name),
            "{error}"
        );
    }
    let last = [(PORT, "65535"), ("TORCHELASTIC_USE_AGENT_STORE", "True")];
    let error = read(&with(TORCHRUN_SET, &last), true).unwrap_err();
    assert!(error.to_string().contains("below 65535"), "{error}");
}
