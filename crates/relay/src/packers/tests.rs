use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::block::BLOCK_BYTES_MAX;
use crate::entropy_filter::tests::noise;
use crate::packers::bundle::PackedBlock;

fn settings(cores: usize) -> PackersSettings {
    PackersSettings { cores, cpus: vec![], gives_way: true, concurrent: ConcurrentSenders::default() }
}

fn words(bytes: usize) -> Vec<u8> {
    b"the and for was ".iter().copied().cycle().take(bytes).collect()
}

/// A pool without threads.
fn idle_pool(cores: usize) -> Arc<Pool> {
    Arc::new(Pool::new(settings(cores)))
}

fn offer(pool: &Arc<Pool>, raw: &[u8]) -> Bundle {
    let item = Arc::new(Item::new(Arc::new(raw.to_vec())));
    assert!(pool.push(Arc::clone(&item)));
    Bundle::new(item, Arc::clone(pool))
}

fn is_done(bundle: &Bundle) -> bool {
    let done = std::pin::pin!(bundle.done());
    done.poll(&mut Context::from_waker(Waker::noop())) == Poll::Ready(())
}

fn unpacked(frames: &[u8], bytes: usize) -> Result<Vec<u8>, crate::RelayError> {
    let mut raw = vec![0; bytes];
    BundleUnpacker::new()?.unpack(frames, &mut raw).map(|()| raw)
}

#[test]
fn what_is_offered_is_packed_by_idle_cores_and_comes_back() {
    let packers = Packers::start(settings(2)).unwrap();
    let raw = [words(3 * BLOCK_BYTES_MAX), noise(40_000), words(70_000)].concat();
    let bundle = packers.offer(Arc::new(raw.clone())).unwrap();
    // A thread without a core notices some time later.
    let end = Instant::now() + Duration::from_mins(2);
    while !is_done(&bundle) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
    if let Some(frames) = bundle.take() {
        assert!(frames.len() < raw.len(), "{}", frames.len());
        assert!(unpacked(&frames, raw.len()).unwrap() == raw);
        assert!(Arc::ptr_eq(&frames, &bundle.take().unwrap()), "it is the same again");
        assert!(packers.cpu() > Duration::ZERO);
    } else {
        eprintln!("SKIPPED: no core was idle");
    }
    packers.close();
    assert!(packers.offer(Arc::new(raw)).is_none());
}

#[test]
fn what_looks_random_or_is_nobodys_business_is_not_taken() {
    let packers = Packers::start(settings(1)).unwrap();
    assert!(packers.would_pack(&words(1 << 20)) && !packers.would_pack(&noise(1 << 20)));
    assert!(!packers.would_pack(&words(100)));
    assert!(!Packers::start(settings(0)).unwrap().would_pack(&words(1 << 20)));
}

#[test]
fn what_was_packed_by_the_time_it_is_taken_goes_packed_and_the_rest_as_it_is() {
    let pool = idle_pool(1);
    let raw = words(3 * BLOCK_BYTES_MAX);
    let bundle = offer(&pool, &raw);
    assert!(!is_done(&bundle), "a thread may come");
    let item = pool.take_work().unwrap();
    let held = item.begin().unwrap();
    let block = &(*held).as_ref()[..BLOCK_BYTES_MAX];
    let mut packer = crate::pack::Packer::new();
    let codec = drainpipe_engine::transfer::codec::Codec::Lz4;
    let bytes = packer.pack(codec, block).unwrap().unwrap().to_vec();
    let shrunk = || Some(PackedBlock { packing: codec.into(), is_parted: false, bytes: bytes.clone() });
    assert!(item.add(block, shrunk()));
    let frames = bundle.take().unwrap();
    assert!(frames.len() > 2 * BLOCK_BYTES_MAX && frames.len() < 2 * BLOCK_BYTES_MAX + 5_000);
    assert!(unpacked(&frames, raw.len()).unwrap() == raw);
    assert!(!item.add(block, shrunk()), "it comes too late");
    assert!(is_done(&bundle) && Arc::ptr_eq(&frames, &bundle.take().unwrap()));
}

#[test]
fn nobody_waits_for_a_thread_that_does_not_come() {
    let pool = idle_pool(1);
    let (first, second) = (offer(&pool, &words(9_000)), offer(&pool, &words(9_000)));
    assert!(!is_done(&first));
    assert_eq!(first.take(), None);
    assert!(is_done(&second), "for the first one it did not");
    pool.has_packed(PackingTime::default());
    assert!(!is_done(&second));
    pool.allow(0);
    assert!(is_done(&second), "nobody may");
}

#[test]
fn what_is_wanted_comes_first_and_what_was_taken_not_at_all() {
    let pool = idle_pool(3);
    let bundles = [1, 2, 3].map(|blocks| offer(&pool, &words(blocks * 9_000)));
    bundles[0].take();
    assert!(!is_done(&bundles[2]));
    let taken = [(); 2].map(|()| (*pool.take_work().unwrap().begin().unwrap()).as_ref().len());
    assert_eq!(taken, [27_000, 18_000]);
}

#[test]
fn what_waits_is_bounded() {
    let pool = idle_pool(1);
    let bundles: Vec<Bundle> = (0..QUEUE_MAX).map(|_| offer(&pool, &words(9_000))).collect();
    let push = || pool.push(Arc::new(Item::new(Arc::new(words(9_000)))));
    assert!(!push());
    bundles[7].take();
    assert!(push() && !push());
}

proptest! {
    #[test]
    fn arbitrary_frames_never_panic_and_fill_all_or_fail(
        mut frames in prop::collection::vec(any::<u8>(), 0..600), bytes in 1..300_000_usize, is_like_one: bool,
    ) {
        if is_like_one && frames.len() > 8 {
            // Past the first header, where more can go wrong.
            let raw = u32::try_from(bytes.min(BLOCK_BYTES_MAX)).unwrap().to_le_bytes();
            let wire = u32::try_from(frames.len() - 8).unwrap().to_le_bytes();
            let packing = 1 + frames[0] % 2;
            frames[..8].copy_from_slice(&[packing, raw[0], raw[1], raw[2], 0, wire[0], wire[1], wire[2]]);
        }
        if let Ok(raw) = unpacked(&frames, bytes) {
            prop_assert_eq!(raw.len(), bytes);
        }
    }

    #[test]
    fn what_says_another_length_is_refused(bytes in 20_000..300_000_usize, other in 1..300_000_usize) {
        prop_assume!(bytes != other);
        let pool = idle_pool(1);
        let bundle = offer(&pool, &words(bytes));
        let item = pool.take_work().unwrap();
        let held = item.begin().unwrap();
        let mut packer = crate::pack::Packer::new();
        for block in bundle::blocks(0..bytes) {
            let block = &(*held).as_ref()[block];
            let codec = drainpipe_engine::transfer::codec::Codec::Zstd1;
            let packed = packer.pack(codec, block).unwrap().map(<[u8]>::to_vec);
            let packed = packed.map(|bytes| PackedBlock { packing: codec.into(), is_parted: false, bytes });
            prop_assert!(item.add(block, packed));
        }
        let frames = bundle.take().unwrap();
        prop_assert!(unpacked(&frames, bytes).is_ok());
        prop_assert!(unpacked(&frames, other).is_err());
        prop_assert!(unpacked(&frames[..frames.len() - 1], bytes).is_err());
    }
}
