//! An `unreachable` route for packets to a destination that has lost its route.
//!
//! Without it they would follow the next less specific route, such as the default route, over a network that nobody
//! has chosen for them. It is `unreachable`, and not `blackhole`: a new connection then fails because there is no
//! route (EHOSTUNREACH) and not because an argument is invalid (EINVAL). For an established connection, either is a
//! temporary error: TCP sends again until there is a route, or until it gives up as it would anyway.

use ipnet::IpNet;
use netlink_packet_route::route::{RouteAttribute, RouteMessage, RouteType};
use rustix::io::Errno;

use crate::error::Error;
use crate::network::Network;
use crate::request::execute;
use crate::route::{is_unreachable, route_message};
use crate::route_attributes::ROUTE_PROTOCOL;
use crate::undo::{Before, Undo};

/// Worse than that of any other route to the destination.
const METRIC: u32 = u32::MAX;

impl Network {
    pub(crate) async fn observe_unreachable(&self, destination: IpNet) -> Result<Before, Error> {
        let mut before = Before::Absent;
        for message in self.messages_to(destination).await? {
            let protocol = message.header.protocol.into();
            if protocol != ROUTE_PROTOCOL {
                return Err(Error::RouteTaken { destination, protocol });
            }
            if is_unreachable(&message) {
                before = Before::Unreachable;
            }
        }
        Ok(before)
    }

    pub(crate) async fn apply_unreachable(&self, destination: IpNet) -> Result<(), Error> {
        if self.observe_unreachable(destination).await? == Before::Unreachable {
            return Ok(());
        }
        let operation = format!("make {destination} unreachable without its route");
        let message = unreachable_message(destination, &operation)?;
        execute(&operation, self.netlink.route().add(message).execute()).await
    }

    pub(crate) async fn remove_unreachable(&self, destination: IpNet) -> Result<Undo, Error> {
        if !self.messages_to(destination).await?.iter().any(is_unreachable) {
            return Ok(Undo::NothingToDo);
        }
        let operation = format!("no longer make {destination} unreachable");
        let message = unreachable_message(destination, &operation)?;
        match execute(&operation, self.netlink.route().del(message).execute()).await {
            Ok(()) => Ok(Undo::Undone),
            Err(error) if error.errno() == Some(Errno::SRCH) => Ok(Undo::NothingToDo),
            Err(error) => Err(error),
        }
    }
}

fn unreachable_message(destination: IpNet, operation: &str) -> Result<RouteMessage, Error> {
    let mut message = route_message(destination, operation)?;
    message.header.protocol = ROUTE_PROTOCOL.into();
    message.header.kind = RouteType::Unreachable;
    message.attributes.push(RouteAttribute::Priority(METRIC));
    Ok(message)
}
