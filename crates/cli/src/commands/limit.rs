//! `drainpipe limit`.

use drainpipe_api_types::{BandwidthRequest, BandwidthView};
use drainpipe_engine::bandwidth::{BandwidthSetting, Limited};
use drainpipe_engine::format;
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
        Some(setting) => {
            let limited = if arguments.storage { Limited::Storage } else { Limited::All };
            host.client().post(&path, &BandwidthRequest { setting, limited }).await?
        }
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
    let limit = limit_or(view.limit_mbps, "no limit");
    let of_storage = limit_or(view.storage.limit_mbps, "no limit of their own");
    let (why, why_storage) = (why(view.setting), why(view.storage.setting));
    format!(
        "migrations from and to {}: {limit} ({why})\ndisks within that: {of_storage} ({why_storage})",
        view.host
    )
}

fn limit_or(limit_mbps: Option<u64>, none: &str) -> String {
    limit_mbps.map_or(none.into(), |mbps| format!("at most {} in each direction", format::mbps(mbps)))
}

fn why(setting: BandwidthSetting) -> &'static str {
    match setting {
        BandwidthSetting::Configured => "by its agent.toml",
        BandwidthSetting::Unlimited | BandwidthSetting::Mbps(_) => {
            "set with `drainpipe limit`, until you set another"
        }
    }
}
