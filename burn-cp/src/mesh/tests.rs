use super::*;

fn mesh() -> DeviceMesh {
    DeviceMesh::new([("dp", 2), ("cp", 4), ("tp", 3)]).unwrap()
}

#[test]
fn ranks_are_row_major_and_coordinates_invert_them() {
    let mesh = mesh();
    assert_eq!(mesh.world_size(), 24);
    assert_eq!(mesh.to_string(), "dp=2 x cp=4 x tp=3");
    assert_eq!(mesh.coordinates(0).unwrap(), [0, 0, 0]);
    assert_eq!(mesh.coordinates(1).unwrap(), [0, 0, 1]);
    assert_eq!(mesh.coordinates(17).unwrap(), [1, 1, 2]);
    assert_eq!(mesh.coordinate(17, "tp").unwrap(), 2);
    for rank in 0..24 {
        assert_eq!(mesh.rank(&mesh.coordinates(rank).unwrap()).unwrap(), rank);
    }
}

#[test]
fn groups_partition_the_ranks_and_share_the_other_coordinates() {
    let mesh = mesh();
    assert_eq!(mesh.group(17, &["cp"]).unwrap(), [14, 17, 20, 23]);
    assert_eq!(
        mesh.group(17, &["tp", "dp"]).unwrap(),
        [3, 4, 5, 15, 16, 17]
    );
    assert_eq!(mesh.group(17, &[]).unwrap(), [17]);
    let sets: [&[&str]; 8] = [
        &[],
        &["dp"],
        &["cp"],
        &["tp"],
        &["dp", "cp"],
        &["tp", "cp"],
        &["tp", "dp"],
        &["dp", "cp", "tp"],
    ];
    for axes in sets {
        let groups = mesh.groups(axes).unwrap();
        let mut all: Vec<usize> = groups.concat();
        all.sort_unstable();
        assert_eq!(all, (0..24).collect::<Vec<_>>());
        assert!(groups.is_sorted_by_key(|group| group[0]));
        for group in &groups {
            assert!(group.is_sorted());
            for &rank in group {
                assert_eq!(&mesh.group(rank, axes).unwrap(), group);
                let (own, first) = (mesh.coordinates(rank), mesh.coordinates(group[0]));
                for (index, axis) in mesh.axes().iter().enumerate() {
                    if !axes.contains(&axis.name.as_str()) {
                        assert_eq!(own.as_ref().unwrap()[index], first.as_ref().unwrap()[index]);
                    }
                }
            }
        }
    }
}

#[test]
fn a_mesh_that_does_not_fit_the_world_names_all_factors() {
    let mesh = DeviceMesh::new([("dp", 2), ("cp", 4)]).unwrap();
    assert!(mesh.check_world(8).is_ok());
    assert_eq!(
        mesh.check_world(6).unwrap_err().to_string(),
        "mesh dp=2 x cp=4 = 8 ranks, but the world has 6"
    );
}

#[test]
fn bad_axes_are_refused() {
    let error = |axes: &[(&str, usize)]| DeviceMesh::new(axes.iter().copied()).unwrap_err();
    assert_eq!(error(&[]), MeshError::NoAxes);
    assert_eq!(
        error(&[("dp", 1), (" ", 2)]),
        MeshError::EmptyName { index: 1 }
    );
    assert!(matches!(
        error(&[("cp", 1), ("cp", 2)]),
        MeshError::DuplicateName { .. }
    ));
    assert!(matches!(error(&[("cp", 0)]), MeshError::ZeroSize { .. }));
    assert!(matches!(
        error(&[("a", usize::MAX), ("b", 2)]),
        MeshError::Overflow { .. }
    ));
}

#[test]
fn bad_questions_are_refused() {
    let mesh = mesh();
    assert_eq!(
        mesh.axis_size("pp").unwrap_err().to_string(),
        "mesh has no axis \"pp\"; its axes are dp, cp, tp"
    );
    assert_eq!(mesh.axis_size("cp").unwrap(), 4);
    assert!(matches!(
        mesh.group(0, &["cp", "cp"]),
        Err(MeshError::RepeatedAxis { .. })
    ));
    assert!(matches!(
        mesh.group(24, &["cp"]),
        Err(MeshError::RankOutOfRange { .. })
    ));
    assert!(matches!(
        mesh.coordinates(24),
        Err(MeshError::RankOutOfRange { .. })
    ));
    assert!(matches!(
        mesh.rank(&[0, 0]),
        Err(MeshError::NumCoordinates { .. })
    ));
    assert!(matches!(
        mesh.rank(&[0, 4, 0]),
        Err(MeshError::CoordinateOutOfRange { .. })
    ));
}

#[test]
fn a_mesh_survives_serialisation_and_bad_text_is_refused() {
    let mesh = mesh();
    let text = serde_json::to_string(&mesh).unwrap();
    assert_eq!(serde_json::from_str::<DeviceMesh>(&text).unwrap(), mesh);
    let zero = serde_json::from_str::<DeviceMesh>(r#"[{"name":"cp","size":0}]"#).unwrap_err();
    assert!(
        zero.to_string()
            .contains("\"cp\": expected a size of at least 1")
    );
    assert!(serde_json::from_str::<DeviceMesh>(r#"[{"name":"cp","size":1,"x":1}]"#).is_err());
}
