//! Peers that do not behave as they should.

use drainpipe_nbd::{Refusal, Session, SplitterError};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::net::TcpStream;

use crate::noise::noise;
use crate::support::{Bench, Settings, eventually, has_qemu, in_time, said};

/// A stream's greeting, as it is on the wire.
fn greeting(session: [u8; 16], number: u16, disk_bytes: u64) -> Vec<u8> {
    [b"DRPSPLIT\x02", &session[..], &number.to_le_bytes(), &disk_bytes.to_le_bytes()].concat()
}

async fn served(bench: &Bench, says: &[u8]) -> Result<(), SplitterError> {
    let (mut near, far) = duplex(1 << 20);
    near.write_all(says).await.unwrap();
    let serving = tokio::spawn({
        let target = bench.target.clone();
        async move { target.serve(far).await }
    });
    near.shutdown().await.unwrap();
    let mut heard = vec![];
    in_time(near.read_to_end(&mut heard)).await.ok();
    in_time(serving).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_takes_only_streams_of_its_session() {
    if !has_qemu() {
        return;
    }
    let bench = Bench::new(Settings::default()).await;
    let refused = |ended: Result<(), SplitterError>| match ended {
        Err(SplitterError::Refused(refusal)) => refusal,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(served(&bench, &noise(64, 1)).await), Refusal::NoSplitter);
    assert_eq!(refused(served(&bench, &greeting([7; 16], 0, 24 << 20)).await), Refusal::Session);
    assert!(served(&bench, b"DRPSPLIT").await.is_err());
    bench.target.close().await.unwrap();
    assert!(served(&bench, b"DRPSPLIT").await.is_err());
}

/// The source's error when a bad target sends these bytes after its welcome.
async fn ended_by(says: &[u8]) -> SplitterError {
    let mut bench = Bench::new(Settings::default()).await;
    let (stream, mut far) = duplex(1 << 20);
    bench.bring(stream).await;
    let client = bench.qemu_io(&["read 0 64k"]);
    let mut heard = vec![0; 35];
    in_time(far.read_exact(&mut heard)).await.unwrap();
    far.write_all(&[b"DRPSPLIT\0", says].concat()).await.unwrap();
    let ended = bench.ended().await.unwrap_err();
    assert!(!said(client).await.0);
    ended
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_believes_no_answer_that_it_did_not_ask_for() {
    if !has_qemu() {
        return;
    }
    for says in [
        [1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0],
        [2, 0, 0, 0, 255, 255, 255, 255, 0, 0, 0, 0, 0, 0, 0, 0],
        [2, 0, 0, 0, 0, 2, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0],
        [3, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [77; 16],
    ] {
        let ended = ended_by(&says).await;
        assert!(matches!(ended, SplitterError::Malformed(_)), "{says:?}: {ended:?}");
    }
    assert!(matches!(
        ended_by(&[6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).await,
        SplitterError::DiskElsewhere
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn only_one_client_that_knows_the_name_is_served() {
    if !has_qemu() {
        return;
    }
    let mut bench = Bench::new(Settings::default()).await;
    bench.connect_many(2).await;
    let address = bench.address().trim_start_matches("nbd://").to_owned();
    let (host, name) = address.split_once('/').unwrap();
    // A peer that says nothing, and one that guesses, hold nobody up.
    let _mute = TcpStream::connect(host).await.unwrap();
    let mut guess = TcpStream::connect(host).await.unwrap();
    guess.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x05guess").await.unwrap();
    let mut heard = vec![];
    in_time(guess.read_to_end(&mut heard)).await.ok();
    assert!(heard.starts_with(b"NBDMAGICIHAVEOPT") && heard.len() == 18, "{heard:?}");

    let mut client = TcpStream::connect(host).await.unwrap();
    enter(&mut client, name).await;
    let refused = async {
        while TcpStream::connect(host).await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    in_time(refused).await;
    drop(client);
    let ended = bench.ended().await;
    assert!(matches!(ended, Err(SplitterError::Client(_))), "{ended:?}");
}

async fn enter(client: &mut TcpStream, name: &str) {
    let length = u32::try_from(name.len()).unwrap().to_be_bytes();
    client
        .write_all(&[b"\0\0\0\x03IHAVEOPT\0\0\0\x01", &length[..], name.as_bytes()].concat())
        .await
        .unwrap();
    let mut heard = [0; 18 + 10];
    in_time(client.read_exact(&mut heard)).await.unwrap();
    assert_eq!(heard[18..26], (24_u64 << 20).to_be_bytes());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_asks_for_too_much_is_turned_away() {
    if !has_qemu() {
        return;
    }
    let mut bench = Bench::new(Settings::default()).await;
    bench.connect_many(1).await;
    let address = bench.address().trim_start_matches("nbd://").to_owned();
    let (host, name) = address.split_once('/').unwrap();
    let mut client = TcpStream::connect(host).await.unwrap();
    enter(&mut client, name).await;
    let mut request = [0; 28];
    request[..8].copy_from_slice(&[0x25, 0x60, 0x95, 0x13, 0, 0, 0, 1]);
    request[24..].copy_from_slice(&u32::MAX.to_be_bytes());
    client.write_all(&request).await.unwrap();
    let ended = bench.ended().await;
    assert!(matches!(ended, Err(SplitterError::ClientMalformed(_))), "{ended:?}");
}

/// A target's stream that is entered by hand.
async fn entered(bench: &Bench, session: [u8; 16], number: u16) -> DuplexStream {
    let (mut near, far) = duplex(1 << 20);
    let target = bench.target.clone();
    let ended = std::sync::Arc::clone(&bench.served);
    tokio::spawn(async move {
        let served = target.serve(far).await;
        ended.lock().unwrap().push(served);
    });
    near.write_all(&greeting(session, number, 24 << 20)).await.unwrap();
    let mut heard = [0; 9];
    in_time(near.read_exact(&mut heard)).await.unwrap();
    assert_eq!(&heard, b"DRPSPLIT\0");
    near
}

/// How this many streams ended, which is known a moment after their sources hear of it.
async fn all_ended(bench: &Bench, count: usize) -> Vec<Result<(), SplitterError>> {
    eventually("all streams have ended", || bench.served.lock().unwrap().len() >= count).await;
    std::mem::take(&mut *bench.served.lock().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_of_no_good_reaches_nothing_beyond_the_disk() {
    if !has_qemu() {
        return;
    }
    let session = [9; 16];
    let bench = Bench::with_session(Settings::default(), Session(session)).await;
    let question = |kind: u8, length: u32, offset: u64, handle: u64| {
        let mut bytes = [0; 24];
        bytes[0] = kind;
        bytes[4..8].copy_from_slice(&length.to_le_bytes());
        bytes[8..16].copy_from_slice(&offset.to_le_bytes());
        bytes[16..].copy_from_slice(&handle.to_le_bytes());
        bytes
    };
    let wrong = [
        question(2, 512, 24 << 20, 0),
        question(1, 512, u64::MAX, 0),
        question(2, 1 << 30, 0, 0),
        question(3, 512, 0, u64::MAX),
        question(6, 0, 70_000, 0),
        question(9, 0, 0, 0),
    ];
    for (number, wrong) in (0..).zip(wrong) {
        let mut stream = entered(&bench, session, number).await;
        stream.write_all(&wrong).await.unwrap();
        let mut heard = vec![];
        in_time(stream.read_to_end(&mut heard)).await.unwrap();
        assert_eq!(heard[0], 6, "{wrong:?}");
    }
    let ended = all_ended(&bench, wrong.len()).await;
    assert!(ended.iter().all(|ended| matches!(ended, Err(SplitterError::Malformed(_)))), "{ended:?}");

    for (number, packed) in (10..).zip([vec![0; 8], vec![0xff; 4], [&[9, 0, 0, 0][..], &[1; 9]].concat()]) {
        let mut stream = entered(&bench, session, number).await;
        stream.write_all(&[&question(10, 4096, 0, 1)[..], &packed].concat()).await.unwrap();
        let mut heard = vec![];
        in_time(stream.read_to_end(&mut heard)).await.unwrap();
        assert_eq!(heard[0], 6, "{packed:?}");
    }
    let ended = all_ended(&bench, 3).await;
    let is_no_good = |ended: &_| matches!(ended, Err(SplitterError::Malformed(_) | SplitterError::Unpack(_)));
    assert!(ended.len() == 3 && ended.iter().all(is_no_good), "{ended:?}");

    // A fenced stream is not heard any more, and its number is used up.
    let mut old = entered(&bench, session, 100).await;
    let mut new = entered(&bench, session, 101).await;
    new.write_all(&question(6, 0, 100, 0)).await.unwrap();
    let mut heard = [0; 16];
    in_time(new.read_exact(&mut heard)).await.unwrap();
    assert_eq!(heard[..5], [3, 0, 0, 0, 100]);
    let late = [&question(2, 512, 0, 1)[..], &[1; 512]].concat();
    // The stream may be closed already.
    old.write_all(&late).await.ok();
    let again = served(&bench, &greeting(session, 100, 24 << 20)).await;
    assert!(matches!(again, Err(SplitterError::Refused(Refusal::Number))), "{again:?}");
    bench.target.close().await.unwrap();
    assert!(std::fs::read(bench.path("target")).unwrap().iter().all(|byte| *byte == 0));
}
