//! The measurements, as tables.

use drainpipe_engine::drain::status::DrainStatus;
use drainpipe_engine::format::{estimate, estimate_up_to};

use super::{Drained, FIXED, HOLDS_WITHIN, Round};
use crate::measure_faults::spread;

fn whole(drained: &Drained) -> f64 {
    drained.status.predicted_ms / drained.status.elapsed_ms
}

fn holds(ratio: f64) -> bool {
    (ratio - 1.0).abs() <= HOLDS_WITHIN
}

pub(super) fn print(rounds: &[Round]) {
    print_figures(rounds);
    for round in rounds {
        print_vms(round);
    }
}

fn print_figures(rounds: &[Round]) {
    let found = || rounds.iter().filter_map(|round| Some((round, round.found.as_ref()?)));
    let of = |value: fn(&Drained) -> f64, digits| spread(found().map(|(_, drained)| value(drained)), digits);
    let predictions: Vec<f64> = found().flat_map(|(_, drained)| drained.predictions()).collect();
    let held = predictions.iter().filter(|ratio| holds(**ratio)).count();
    let silences = found().flat_map(|(_, drained)| drained.silences.values().map(|silence| silence.ms));
    let alone = || rounds.iter().flat_map(|round| round.alone.values());
    let medians = alone().map(|alone| alone.median_ms);
    let most = alone().map(|alone| alone.most_ms / alone.median_ms).fold(0.0, f64::max);
    let pages: u64 = rounds.iter().flat_map(Round::drains).map(|(_, drained)| drained.pages).sum();
    println!("| figure | promise | measured |");
    println!("|---|---|---|");
    line("drain, the whole command, s", "", &of(|drained| drained.wall_s, 2));
    line("drain, from the plan on, s", "", &of(Drained::moving_s, 2));
    line("loop of `migrate --option tcp`, s", "", &spread(rounds.iter().filter_map(|round| round.loop_s), 2));
    let against_loop = found().filter_map(|(round, drained)| Some(drained.wall_s / round.loop_s?));
    line("whole command ÷ loop", "≤ 0.45", &spread(against_loop, 3));
    let auto = || rounds.iter().filter_map(|round| Some((round, round.auto.as_ref()?)));
    let of_auto =
        |value: fn(&Drained) -> f64, digits| spread(auto().map(|(_, drained)| value(drained)), digits);
    line("drain by `auto`, the whole command, s", "", &of_auto(|drained| drained.wall_s, 2));
    let against_loop = auto().filter_map(|(round, drained)| Some(drained.wall_s / round.loop_s?));
    line("the same ÷ loop", "≤ 0.30", &spread(against_loop, 3));
    line("the same, whole, predicted ÷ measured", "0.85–1.15", &of_auto(whole, 3));
    line("bytes sent ÷ both links, s", "", &of(Drained::bound_s, 2));
    line("from the plan on ÷ that", "≤ 1.08", &of(|drained| drained.moving_s() / drained.bound_s(), 3));
    line("whole command ÷ that", "", &of(|drained| drained.wall_s / drained.bound_s(), 3));
    line("before the first byte, ms", "", &of(Drained::before_first_byte_ms, 0));
    for transfers in FIXED {
        let fixed = rounds.iter().filter_map(|round| round.fixed.get(transfers)).map(Drained::moving_s);
        line(&format!("drain with `--transfers {transfers}`, from the plan on, s"), "", &spread(fixed, 2));
    }
    line("found number at a time", "", &of(|drained| f64::from(drained.status.transfers), 0));
    let against_fixed =
        found().filter_map(|(round, drained)| Some(drained.moving_s() / round.best_fixed_s()?));
    line("found ÷ best fixed", "≤ 1.05", &spread(against_fixed, 3));
    line("whole, predicted ÷ measured", "0.85–1.15", &of(whole, 3));
    let of_vms = format!("{held} of {}", predictions.len());
    line("VMs predicted within 15 %", "9 of 10", &of_vms);
    line("VM, predicted ÷ measured", "", &spread(predictions.into_iter(), 3));
    line("longest silence of each guest, moved alone, ms", "", &spread(medians, 0));
    line("the longest of a guest's three alone ÷ their median, worst", "", &format!("{most:.2}"));
    line("longest silence of each guest, drain, ms", "", &spread(silences, 0));
    let against_alone = found().map(|(round, drained)| worst(drained, round));
    line("worst of a guest in the drain ÷ alone", "≤ 1.5", &spread(against_alone, 2));
    line("pages checked after drains, none bad", "", &pages.to_string());
}

/// The largest of the ratios.
fn worst(drained: &Drained, round: &Round) -> f64 {
    let ratios = drained
        .silences
        .iter()
        .filter_map(|(name, silence)| Some(silence.ms / round.alone.get(name)?.median_ms));
    ratios.fold(0.0, f64::max)
}

/// The outcome of each VM, and the times when the links stood still.
fn print_vms(round: &Round) {
    for (way, drained) in round.drains() {
        println!();
        println!("Number at a time: {way}. All times in ms, from the begin of the drain.");
        println!();
        println!(
            "| VM | begun | setup | held | completion | on the links | paused | sent | runs | over | predicted | \
             transfer | sent ÷ predicted bytes | silence | began | alone |"
        );
        println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|");
        for (one, result) in drained.status.moves.iter().zip(&drained.results) {
            let released = drained.released_ms(result);
            let began_ms = drained.started_ms(result);
            let logged = |what: &str| {
                let line = result.record.events.iter().find(|line| line.what.contains(what));
                line.map_or(f64::NAN, |line| began_ms + line.ms)
            };
            let silence = &drained.silences[&one.vm];
            println!(
                "| {} | {began_ms:.0} | {:.0} | {:.0} | {:.0} | {released:.0} | {:.0} | {:.0} | {:.0} | {:.0} | \
                 {:.0} | {:.0} | {:.3} | {:.0} | {:.0} | {:.0} |",
                one.vm,
                result.times.setup_ms,
                result.times.held_ms,
                result.times.completion_ms,
                logged("paused on the source"),
                logged("all state is on"),
                logged("runs on the target"),
                began_ms + result.times.total_ms,
                one.predicted_ms,
                result.times.transfer_ms,
                one.sent_bytes as f64 / one.predicted_bytes.max(1) as f64,
                silence.ms,
                silence.began.map_or(f64::NAN, |began| drained.ms_at(began)),
                round.alone.get(&one.vm).map_or(f64::NAN, |alone| alone.median_ms),
            );
        }
        println!();
        println!("{}", drained.gaps());
        print_time_left(drained);
    }
}

/// The reported time left, and the true one.
fn print_time_left(drained: &Drained) {
    let DrainStatus { predicted_ms, predicted_most_ms, elapsed_ms, warnings, .. } = &drained.status;
    let predicted = estimate_up_to(*predicted_ms, *predicted_most_ms);
    println!();
    println!("Predicted {predicted}, took {}. {}", estimate(*elapsed_ms), warnings.join(". "));
    println!();
    println!("| after, s | moved | left, told, s | left, s | told ÷ left |");
    println!("|---|---|---|---|---|");
    for report in &drained.reports {
        let left_s = (drained.status.elapsed_ms - report.elapsed_ms) / 1e3;
        let eta_s = report.eta_ms.map_or(f64::NAN, |ms| ms / 1e3);
        let (after_s, moved) = (report.elapsed_ms / 1e3, report.moved);
        println!("| {after_s:.1} | {moved} | {eta_s:.1} | {left_s:.1} | {:.2} |", eta_s / left_s);
    }
}

fn line(figure: &str, promise: &str, measured: &str) {
    println!("| {figure} | {promise} | {measured} |");
}
