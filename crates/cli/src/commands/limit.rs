//! `drainpipe limit`.

use drainpipe_agent::api_types::{BandwidthRequest, BandwidthView};
use drainpipe_engine::bandwidth::BandwidthSetting;
use drainpipe_engine::problem::Problem;

use crate::arguments::LimitArguments;
use crate::connection::ConnectionArguments;
use crate::exit::Exit;
use crate::output;

pub(crate) async fn run(
    connection: &ConnectionArguments,
    arguments: &LimitArguments,
    json: bool,
) -> Result<Exit, Problem> {
    let host = connection.fleet()?.host(&arguments.host).await?;
    let path = host.path("/v1/bandwidth");
    let view: BandwidthView = match arguments.limit {
        Some(setting) => host.client().post(&path, &BandwidthRequest { setting }).await?,
        None => host.client().get(&path).await?,
    };
    if json {
        output::json(&view)?;
    } else {
        output::print(&format!("{}\n", describe(&view)))?;
    }
    Ok(Exit::Done)
}

fn describe(view: &BandwidthView) -> String {
    let limit = view
        .limit_mbps
        .map_or("as fast as the links are".into(), |mbps| format!("not above {mbps} Mb/s in each direction"));
    let why = match view.setting {
        BandwidthSetting::Configured => "by its agent.toml",
        BandwidthSetting::Unlimited | BandwidthSetting::Mbps(_) => {
            "set with `drainpipe limit`, until it is set anew"
        }
    };
    format!("migrations from and to {}: {limit} ({why})", view.host)
}
