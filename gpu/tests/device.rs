//! The device opens, computes, and says what is wrong.

#![allow(clippy::unwrap_used)]

mod common;

use kv_gpu::pq::{Attend, AttendShape};
use kv_gpu::{Device, Element, Error, self_test};
use pq_core::PqShape;

#[test]
fn the_device_computes() {
    let Some(device) = common::device("the_device_computes") else { return };
    assert!(device.capability() >= (8, 0), "sm_80 is the floor");
    self_test(&device).unwrap();
    self_test(&device).unwrap(); // from the cache in memory
}

#[test]
fn the_disk_cache_serves_only_what_belongs() {
    let Some(device) = common::device("the_disk_cache_serves_only_what_belongs") else { return };
    let folder = std::env::temp_dir().join(format!("kv-gpu-test-{}", std::process::id()));
    self_test(&device.with_disk_cache(&folder)).unwrap();
    let files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    let kept = std::fs::read(&files[0]).unwrap();
    self_test(&Device::open(0).unwrap().with_disk_cache(&folder)).unwrap();
    std::fs::write(&files[0], b"something else").unwrap();
    self_test(&Device::open(0).unwrap().with_disk_cache(&folder)).unwrap();
    assert!(std::fs::read(&files[0]).unwrap() == kept, "the file is written anew");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_device_that_is_not_there_is_an_error() {
    let error = Device::open(4096).err().unwrap();
    let named = matches!(&error, Error::Driver { operation, .. } if operation == "open device");
    assert!(error == Error::NoDriver || named, "{error}");
}

#[test]
fn shapes_without_a_kernel_are_errors() {
    let good = PqShape::new(128, 64, 8).unwrap();
    for (keys, values, group) in [
        (PqShape::new(96, 48, 8).unwrap(), PqShape::new(96, 48, 8).unwrap(), 1),
        (PqShape::new(128, 64, 12).unwrap(), good, 1),
        (good, PqShape::new(64, 32, 8).unwrap(), 1),
        (good, good, 0),
        (good, good, 17),
    ] {
        let shape = AttendShape { keys, values, group, element: Element::F16, paged: false };
        assert!(matches!(shape.check(), Err(Error::Unsupported { .. })), "{shape:?}");
        if let Ok(device) = Device::open(0) {
            assert!(Attend::new(&device, shape).is_err());
        }
    }
}
