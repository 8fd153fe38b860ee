//! One address for several disks, for a client that asks for each by a name of its own. Others may know such names, so
//! the owner of the reception says which connections are the client's.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::debug;

use super::shared::Shared;
use super::{Entrance, Export, SourceSplitter, listen_on_loopback};
use crate::error::SplitterError;
use crate::limits::{CANDIDATES_MAX, GREETING};
use crate::nbd::{self, Offered};

/// One disk that nobody has asked for yet.
#[derive(Debug)]
struct Awaited {
    name: String,
    size_bytes: u64,
    tell: oneshot::Sender<TcpStream>,
}

/// Where the client of several disks comes to.
#[derive(Debug)]
pub struct Reception {
    listener: TcpListener,
    address: SocketAddr,
    awaited: Vec<Awaited>,
}

impl Reception {
    /// On loopback. Needs a tokio runtime with I/O and time.
    pub async fn listen() -> Result<Self, SplitterError> {
        let (listener, address) = listen_on_loopback().await?;
        Ok(Self { listener, address, awaited: vec![] })
    }

    /// Where the client connects to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves one more disk, which the client asks for by this name.
    pub fn serve(&mut self, name: &str, export: Export) -> SourceSplitter {
        let (tell, client) = oneshot::channel();
        self.awaited.push(Awaited { name: name.into(), size_bytes: export.size_bytes, tell });
        let (shared, done) = Shared::named(name.into(), export);
        let entrance = Entrance::Reception(client);
        SourceSplitter { entrance, address: self.address, shared: Arc::new(shared), done }
    }

    /// Lets the client in, once for each disk, and ends. `is_client` is asked of each connection by its other end's address; it may
    /// take a moment, and is asked on a thread of its own.
    pub async fn run(self, is_client: impl Fn(SocketAddr) -> bool + Clone + Send + 'static) {
        let Self { listener, mut awaited, .. } = self;
        let mut candidates = JoinSet::new();
        while !awaited.is_empty() {
            let offered: Arc<[Offered]> = awaited.iter().map(Awaited::offered).collect();
            tokio::select! {
                accepted = listener.accept(), if candidates.len() < CANDIDATES_MAX => {
                    // Those that nobody has asked for end with this.
                    let Ok((stream, from)) = accepted else { return };
                    candidates.spawn(timeout(GREETING, greet(stream, from, offered, is_client.clone())));
                }
                Some(tried) = candidates.join_next() => match tried {
                    Ok(Ok(Ok((stream, name)))) => let_in(&mut awaited, stream, &name),
                    Ok(Ok(Err(error))) => debug!(%error, "refused an NBD client"),
                    Ok(Err(_)) | Err(_) => debug!("an NBD client took too long to say what it wants"),
                }
            }
        }
    }
}

impl Awaited {
    fn offered(&self) -> Offered {
        Offered { name: self.name.clone(), disk_bytes: self.size_bytes }
    }
}

async fn greet(
    mut stream: TcpStream,
    from: SocketAddr,
    offered: Arc<[Offered]>,
    is_client: impl Fn(SocketAddr) -> bool + Send + 'static,
) -> Result<(TcpStream, String), SplitterError> {
    let is_welcome = tokio::task::spawn_blocking(move || is_client(from)).await.unwrap_or(false);
    if !is_welcome {
        return Err(SplitterError::OtherClient);
    }
    stream.set_nodelay(true).map_err(SplitterError::client)?;
    let chosen = nbd::offer(&mut stream, &offered).await?;
    let name = offered[chosen].name.clone();
    Ok((stream, name))
}

/// Ignores a stream that comes a second time.
fn let_in(awaited: &mut Vec<Awaited>, stream: TcpStream, name: &str) {
    let Some(at) = awaited.iter().position(|one| one.name == name) else { return };
    // A splitter that has ended takes none.
    let _ended = awaited.swap_remove(at).tell.send(stream);
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::net::Ipv4Addr;
    use std::sync::Mutex;

    use tokio::net::TcpSocket;

    use super::*;
    use crate::greeting::{SESSION_BYTES, Session};
    use crate::pace::Pace;
    use crate::source::There;

    fn export(size_bytes: u64) -> Export {
        Export {
            session: Session([7; SESSION_BYTES]),
            size_bytes,
            finds_zeroes: true,
            there: There::Zeroes,
            is_thin: true,
            pace: Pace::default(),
            packers: None,
        }
    }

    /// The client's connections, by their ends.
    #[derive(Clone, Default)]
    struct Known(Arc<Mutex<HashSet<SocketAddr>>>);

    impl Known {
        fn has(&self, from: SocketAddr) -> bool {
            self.0.lock().unwrap().contains(&from)
        }

        async fn connect(&self, to: SocketAddr, is_client: bool) -> TcpStream {
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
            if is_client {
                self.0.lock().unwrap().insert(socket.local_addr().unwrap());
            }
            socket.connect(to).await.unwrap()
        }
    }

    #[tokio::test]
    async fn each_disk_is_served_to_the_client_alone_whatever_others_know() {
        let mut reception = Reception::listen().await.unwrap();
        let (address, known) = (reception.address(), Known::default());
        let disks = [("drive-vda", 1 << 20), ("drive-vdb", 2 << 20)]
            .map(|(name, size)| reception.serve(name, export(size)));
        assert_eq!(disks.each_ref().map(SourceSplitter::address), [address; 2]);
        let serving = tokio::spawn({
            let known = known.clone();
            reception.run(move |from| known.has(from))
        });
        let open = async |name: &str, size: u64, is_client: bool| {
            let mut stream = known.connect(address, is_client).await;
            nbd::open(&mut stream, name, size).await.is_ok()
        };
        assert!(!open("drive-vda", 1 << 20, false).await, "another client");
        assert!(!open("drive-vdc", 1 << 20, true).await, "no such disk");
        assert!(open("drive-vdb", 2 << 20, true).await);
        assert!(open("drive-vda", 1 << 20, true).await);
        timeout(GREETING, serving).await.unwrap().unwrap();
        for disk in disks {
            let Entrance::Reception(client) = disk.entrance else { panic!("it is the reception's") };
            assert!(client.await.is_ok());
        }
    }
}
