//! A port on which only certain sources are answered.
//!
//! Routing rules, see ip-rule(8), discard what the host would answer to others, above all the second packet of TCP's
//! handshake. So they hold before anybody listens on the port, whoever listens, and leave firewalls alone. Programs on
//! this host are not kept out: the kernel looks up local addresses before any rule.

use std::net::IpAddr;

use netlink_packet_core::DefaultNla;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage, RulePortRange};
use rtnetlink::IpVersion;
use rustix::io::Errno;

use crate::request::{collect, execute};
use crate::route_attributes::ROUTE_PROTOCOL;
use crate::undo::Undo;
use crate::{Error, Network};

/// `FRA_IP_PROTO` of `linux/fib_rules.h`, whose values the crate does not hand out.
const IP_PROTOCOL: u16 = 22;
const TCP: u8 = 6;

/// Before all rules of others but the kernel's first.
const LET_THROUGH: u32 = 1;
const THROW_AWAY: u32 = 2;
/// Where those that are let through go on.
const GO_ON: u32 = 3;

impl Network {
    pub(crate) async fn apply_only_from(
        &self,
        address: IpAddr,
        port: u16,
        sources: &[IpAddr],
    ) -> Result<(), Error> {
        let operation = format!("allow only {sources:?} to reach port {port} of {address}");
        for rule in rules(address, port, sources) {
            let mut request = self.netlink.rule().add();
            *request.message_mut() = rule;
            match execute(&operation, request.execute()).await {
                Err(error) if error.errno() == Some(Errno::EXIST) => {}
                made => made?,
            }
        }
        Ok(())
    }

    pub(crate) async fn remove_only_from(
        &self,
        address: IpAddr,
        port: u16,
        sources: &[IpAddr],
    ) -> Result<Undo, Error> {
        let operation = format!("open port {port} of {address} to all again");
        let mut undo = Undo::NothingToDo;
        for rule in rules(address, port, sources).into_iter().rev() {
            if rule.header.action == RuleAction::Nop && self.has_rules_that_need_it(address).await? {
                continue;
            }
            match execute(&operation, self.netlink.rule().del(rule).execute()).await {
                Err(error) if error.errno() == Some(Errno::NOENT) => {}
                removed => {
                    removed?;
                    undo = Undo::Undone;
                }
            }
        }
        Ok(undo)
    }

    pub(crate) async fn is_only_from(&self, address: IpAddr, port: u16) -> Result<bool, Error> {
        let refusal = refusal(address, port);
        let range = RuleAttribute::SourcePortRange(RulePortRange { start: port, end: port });
        Ok(self.our_rules(address).await?.iter().any(|rule| {
            rule.header.action == refusal.header.action
                && rule.attributes.contains(&range)
                && rule.attributes.contains(&RuleAttribute::Source(address))
        }))
    }

    async fn has_rules_that_need_it(&self, address: IpAddr) -> Result<bool, Error> {
        let ours = self.our_rules(address).await?;
        Ok(ours.iter().any(|rule| rule.header.action == RuleAction::Goto))
    }

    async fn our_rules(&self, address: IpAddr) -> Result<Vec<RuleMessage>, Error> {
        let version = || if address.is_ipv4() { IpVersion::V4 } else { IpVersion::V6 };
        let rules = collect("list the rules of routing", || self.netlink.rule().get(version()).execute());
        let ours = RuleAttribute::Protocol(ROUTE_PROTOCOL.into());
        Ok(rules.await?.into_iter().filter(|rule| rule.attributes.contains(&ours)).collect())
    }
}

/// In the order in which they are to be made: nobody who may come is ever thrown away.
fn rules(address: IpAddr, port: u16, sources: &[IpAddr]) -> Vec<RuleMessage> {
    let go_on = rule(address, RuleAction::Nop, GO_ON);
    let same_family = sources.iter().filter(|source| source.is_ipv4() == address.is_ipv4());
    let let_through = same_family.map(|source| {
        let mut rule = of_port(rule(address, RuleAction::Goto, LET_THROUGH), address, port);
        rule.header.dst_len = prefix_length(*source);
        rule.attributes.extend([RuleAttribute::Destination(*source), RuleAttribute::Goto(GO_ON)]);
        rule
    });
    [go_on].into_iter().chain(let_through).chain([refusal(address, port)]).collect()
}

fn refusal(address: IpAddr, port: u16) -> RuleMessage {
    of_port(rule(address, RuleAction::Blackhole, THROW_AWAY), address, port)
}

fn rule(address: IpAddr, action: RuleAction, priority: u32) -> RuleMessage {
    let mut rule = RuleMessage::default();
    rule.header.family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    rule.header.action = action;
    rule.attributes = vec![RuleAttribute::Priority(priority), RuleAttribute::Protocol(ROUTE_PROTOCOL.into())];
    rule
}

fn of_port(mut rule: RuleMessage, address: IpAddr, port: u16) -> RuleMessage {
    rule.header.src_len = prefix_length(address);
    rule.attributes.extend([
        RuleAttribute::Source(address),
        RuleAttribute::Other(DefaultNla::new(IP_PROTOCOL, vec![TCP])),
        RuleAttribute::SourcePortRange(RulePortRange { start: port, end: port }),
    ]);
    rule
}

fn prefix_length(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}
