//! Over which receive queues a driver spreads incoming packets (receive side scaling), by ethtool's netlink family.

use std::collections::BTreeSet;

use futures_util::StreamExt;
use netlink_packet_core::{
    DecodeError, DefaultNla, Emitable, NLA_F_NESTED, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
    NlasIterator, ParseableParametrized,
};
use netlink_packet_generic::{GenlFamily, GenlHeader, GenlMessage};

use crate::network::Network;
use crate::request::within_deadline;

/// Numbers of `linux/ethtool_netlink.h`.
const ETHTOOL_MSG_RSS_GET: u8 = 38;
const ETHTOOL_A_HEADER_DEV_NAME: u16 = 2;
const ETHTOOL_A_RSS_HEADER: u16 = 1;
const ETHTOOL_A_RSS_INDIR: u16 = 4;

impl Network {
    /// How many receive queues get what arrives on a link, by the driver's indirection table.
    ///
    /// None where that is not known: the kernel tells since Linux 6.2, of links whose driver has such a
    /// table. Like a speed it is advice, never a reason to fail.
    pub async fn receive_queues_in_use(&self, link: &str) -> Option<usize> {
        let asked = within_deadline("read an indirection table", self.indirection_table(link)).await;
        let table = asked.inspect_err(|error| tracing::debug!(%error, link, "how it spreads is unknown"));
        let queues: BTreeSet<u32> = table.ok()??.into_iter().collect();
        Some(queues.len()).filter(|queues| *queues > 0)
    }

    async fn indirection_table(&self, link: &str) -> Option<Vec<u32>> {
        let request = Rss { link: link.to_owned(), table: vec![] };
        let mut message = NetlinkMessage::from(GenlMessage::from_payload(request));
        message.header.flags = NLM_F_REQUEST;
        let mut handle = self.ethtool.handle.clone();
        let answers = handle.request(message).await.ok()?;
        let answer = std::pin::pin!(answers).next().await?.ok()?;
        match answer.payload {
            NetlinkPayload::InnerMessage(answer) => Some(answer.payload.table),
            _ => None,
        }
    }
}

/// A question about a link, or the answer.
#[derive(Debug)]
struct Rss {
    link: String,
    table: Vec<u32>,
}

impl Rss {
    fn header(&self) -> DefaultNla {
        let name = [self.link.as_bytes(), &[0]].concat();
        let name = DefaultNla::new(ETHTOOL_A_HEADER_DEV_NAME, name);
        let mut nested = vec![0; name.buffer_len()];
        name.emit(&mut nested);
        DefaultNla::new(ETHTOOL_A_RSS_HEADER | NLA_F_NESTED, nested)
    }
}

impl GenlFamily for Rss {
    fn family_name() -> &'static str {
        "ethtool"
    }

    fn version(&self) -> u8 {
        1
    }

    fn command(&self) -> u8 {
        ETHTOOL_MSG_RSS_GET
    }
}

impl Emitable for Rss {
    fn buffer_len(&self) -> usize {
        self.header().buffer_len()
    }

    fn emit(&self, buffer: &mut [u8]) {
        self.header().emit(buffer);
    }
}

impl ParseableParametrized<[u8], GenlHeader> for Rss {
    fn parse_with_param(buffer: &[u8], _header: GenlHeader) -> Result<Self, DecodeError> {
        let mut table = vec![];
        for attribute in NlasIterator::new(buffer) {
            let attribute = attribute?;
            if attribute.kind() == ETHTOOL_A_RSS_INDIR {
                let (queues, _) = attribute.value().as_chunks();
                table = queues.iter().map(|queue| u32::from_ne_bytes(*queue)).collect();
            }
        }
        Ok(Self { link: String::new(), table })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(attributes: &[DefaultNla]) -> Vec<u32> {
        let mut buffer = vec![0; attributes.iter().map(Emitable::buffer_len).sum()];
        let mut rest = buffer.as_mut_slice();
        for attribute in attributes {
            let (own, others) = rest.split_at_mut(attribute.buffer_len());
            attribute.emit(own);
            rest = others;
        }
        let header = GenlHeader { cmd: ETHTOOL_MSG_RSS_GET, version: 1 };
        Rss::parse_with_param(&buffer, header).unwrap().table
    }

    #[test]
    fn the_table_is_found_among_what_a_driver_says() {
        let indirection: Vec<u8> = [0_u32, 3, 0, 3].into_iter().flat_map(u32::to_ne_bytes).collect();
        let hash_function = DefaultNla::new(3, 1_u32.to_ne_bytes().to_vec());
        let table = DefaultNla::new(ETHTOOL_A_RSS_INDIR, indirection);
        assert_eq!(parse(&[hash_function.clone(), table]), [0, 3, 0, 3]);
        assert_eq!(parse(&[hash_function]), [0; 0]);
    }

    #[test]
    fn the_question_names_the_link() {
        let question = Rss { link: "eth0".into(), table: vec![] };
        let mut buffer = vec![0; question.buffer_len()];
        question.emit(&mut buffer);
        assert_eq!(buffer, b"\x10\0\x01\x80\x09\0\x02\0eth0\0\0\0\0");
    }
}
