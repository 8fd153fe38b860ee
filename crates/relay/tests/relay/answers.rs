//! The answers of the receiving program, which only the first connection carries.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use drainpipe_relay::{Sender, SenderSettings, ServerTls, Treatment};

use crate::encryption::{Fleet, to_b};
use crate::support::{PATIENCE, Target, start};

const ANSWER: &[u8] = b"all is here";

/// Relays with two connections, of which the first is accepted first.
fn relays() -> Vec<(Target, SenderSettings)> {
    let fleet = Fleet::new();
    let tls = || ServerTls::new(fleet.host("b").server_config_for("a"));
    let encrypted = Target::new(Treatment::Encrypted(tls()), 2);
    let both = Target::new(Treatment::PackedAndEncrypted(tls()), 2);
    let packed = Target::new(Treatment::Packed, 2);
    let to_b = to_b(&fleet.host("a"));
    let settings = [
        encrypted.settings(Treatment::Encrypted(to_b.clone()), 2),
        both.settings(Treatment::PackedAndEncrypted(to_b), 2),
        packed.settings(Treatment::Packed, 2),
    ];
    [encrypted, both, packed].into_iter().zip(settings).collect()
}

/// A connection of both programs, in use.
fn connect(sender: &std::path::Path, target: &Target) -> [UnixStream; 2] {
    let mut source = UnixStream::connect(sender).unwrap();
    source.write_all(b"page").unwrap();
    let mut program = target.program.accept().unwrap().0;
    program.read_exact(&mut [0; 4]).unwrap();
    for end in [&source, &program] {
        end.set_read_timeout(Some(PATIENCE)).unwrap();
    }
    [source, program]
}

#[test]
fn answers_come_back_until_the_program_closes_its_connection() {
    for (target, settings) in relays() {
        let (sender, path) = start(settings);
        let [mut source, mut program] = connect(&path, &target);
        program.write_all(ANSWER).unwrap();
        let mut answer = [0; ANSWER.len()];
        source.read_exact(&mut answer).unwrap();
        assert_eq!(answer, ANSWER);
        source.write_all(b"more").unwrap();
        program.read_exact(&mut [0; 4]).unwrap();
        drop(program);
        assert_eq!(source.read(&mut answer).unwrap(), 0, "no more come");
        end(sender, &target);
    }
}

#[test]
fn answers_come_also_when_all_is_sent() {
    for (target, settings) in relays() {
        let (sender, path) = start(settings);
        let [mut source, mut program] = connect(&path, &target);
        source.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(program.read(&mut [0; 4]).unwrap(), 0);
        program.write_all(ANSWER).unwrap();
        drop(program);
        let mut answer = vec![];
        source.read_to_end(&mut answer).unwrap();
        assert_eq!(answer, ANSWER);
        end(sender, &target);
    }
}

#[test]
fn other_connections_bring_none() {
    for (target, settings) in relays() {
        let (sender, path) = start(settings);
        let _first = connect(&path, &target);
        let [mut source, mut program] = connect(&path, &target);
        program.write_all(ANSWER).unwrap();
        source.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        assert_eq!(source.read(&mut [0; 4]).unwrap_err().kind(), ErrorKind::WouldBlock);
        end(sender, &target);
    }
}

#[track_caller]
fn end(sender: Sender, target: &Target) {
    assert!(sender.error().is_none() && target.receiver.error().is_none());
    drop(sender);
}

#[test]
fn programs_of_other_users_are_closed_at_once() {
    let target = Target::new(Treatment::Packed, 1);
    let other = SenderSettings { users: vec![u32::MAX - 1], ..target.settings(Treatment::Packed, 1) };
    let (sender, path) = start(other);
    let mut program = UnixStream::connect(path).unwrap();
    program.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(program.read(&mut [0; 4]).unwrap(), 0);
    end(sender, &target);
}
