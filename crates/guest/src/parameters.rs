//! The guest's parameters, from the kernel command line.
//!
//! | parameter | default | meaning |
//! |---|---|---|
//! | `drainpipe.address=10.0.0.2/24` | none: must be given | address of eth0 |
//! | `drainpipe.memory_mib=1536` | three quarters of the free memory | memory to fill |
//! | `drainpipe.mix=zero:20,text:30,random:40,shared:10` | `random:100` | percent by kind |
//! | `drainpipe.seed=1` | 0 | same seed, same memory |
//! | `drainpipe.dirty_mib_per_s=100` | 0 | rate of rewriting |
//! | `drainpipe.locality=10` | 100 | percent of the filled memory that is rewritten |
//! | `drainpipe.disks=2` | 0 | so many virtio disks, from the first, are its own to write |
//! | `drainpipe.rewrite_words=8` | 512 | words of 8 bytes at a page's beginning that a rewrite changes |
//!
//! A guest whose parameters are wrong says so on its console and powers off.

use std::fmt;
use std::num::ParseIntError;

use ipnet::Ipv4Net;

use crate::mix::{Kind, Mix, MixError};
use crate::page::PAGE_WORDS;
use crate::protocol::{Dirtying, MIB_PER_S_MAX};

/// What the guest's kernel is best started with, before the parameters.
///
/// * `panic=-1`, with QEMU's `-no-reboot`: a kernel that panics ends its VM.
/// * `no_timer_check`: on a busy host under TCG the kernel's check of its timer fails by chance,
///   and it looks for another ("MP-BIOS bug: 8254 timer not connected to IO-APIC").
/// * `tsc=reliable nowatchdog`: no periodic checks of the clock and of the kernel itself; an idle
///   guest wakes its host a third less often (about 60 against 90 times a second).
/// * `cryptomgr.notests`: its self-tests took 0.44 s of the boot under TCG (kernel 6.1).
/// * `noreplace-smp`: with one vCPU the kernel would take the locks out of its code, which took 0.28 of 2.5 s of CPU
///   until the guest was ready (QEMU 7.2, kernel 6.1): under TCG what has been translated is then translated again.
/// * `mitigations=off`: the lab's guest keeps no secrets, and runs nothing but its one program.
/// * `clearcpuid=erms,fsrm`: TCG moves `rep movsb` and `rep stosb` byte by byte; a CPU model that
///   has them, such as `max`, takes 5 s more of CPU time to fill 1.5 GiB.
pub const KERNEL_OPTIONS: &str = "console=ttyS0 quiet panic=-1 no_timer_check tsc=reliable \
     nowatchdog mitigations=off noreplace-smp cryptomgr.notests clearcpuid=erms,fsrm";

/// They are named by letters.
const DISKS_MAX: u64 = 26;

const PREFIX: &str = "drainpipe.";

/// Memory left to the guest's kernel and program whatever is asked for, in MiB: sockets, page
/// tables, the table of generations.
const RESERVE_MIB: u64 = 48;

/// What the kernel command line asks of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameters {
    /// Address and prefix length of eth0.
    pub address: Ipv4Net,
    /// Memory to fill in MiB; `None` is three quarters of what is free.
    pub memory_mib: Option<u64>,
    /// Content of the filled memory.
    pub mix: Mix,
    /// Selects the content.
    pub seed: u64,
    /// Rewriting from the moment at which the memory is filled.
    pub dirtying: Dirtying,
    /// Words at the beginning of a page that a rewrite changes.
    pub rewrite_words: usize,
    /// Disks that are written, when it is asked for.
    pub disks: usize,
}

/// Why the guest does not start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParameterError {
    /// A parameter that must be given is not.
    #[error("drainpipe.address is missing; add for example drainpipe.address=10.0.0.2/24")]
    NoAddress,
    /// A name that does not exist.
    #[error(
        "there is no parameter `{0}`; there are drainpipe.address, memory_mib, mix, seed, \
         dirty_mib_per_s, locality, rewrite_words and disks"
    )]
    Unknown(String),
    /// A parameter was given twice.
    #[error("`{0}` is given twice; give it once")]
    Twice(String),
    /// Not an address with prefix length.
    #[error("drainpipe.address=`{0}` is not an IPv4 address with prefix length, as 10.0.0.2/24")]
    Address(String),
    /// Not a mix.
    #[error("drainpipe.mix: {0}")]
    Mix(#[from] MixError),
    /// Not a number.
    #[error("{name}=`{value}` is not a whole number: {source}")]
    Number {
        /// The parameter.
        name: String,
        /// What was given.
        value: String,
        /// What is wrong with it.
        source: ParseIntError,
    },
    /// A number outside of its range.
    #[error("{name}={value} is out of range; it goes from {least} to {most}")]
    Range {
        /// The parameter.
        name: &'static str,
        /// What was given.
        value: u64,
        /// The least accepted.
        least: u64,
        /// The most accepted.
        most: u64,
    },
    /// More memory than there is.
    #[error(
        "drainpipe.memory_mib={asked_mib} does not fit: {available_mib} MiB are free, \
         {RESERVE_MIB} of them stay free; ask for less or give the VM more memory"
    )]
    Memory {
        /// MiB asked for.
        asked_mib: u64,
        /// MiB free.
        available_mib: u64,
    },
}

impl Parameters {
    /// Reads a kernel command line; what does not start with `drainpipe.` is the kernel's.
    pub fn parse(command_line: &str) -> Result<Self, ParameterError> {
        let given = Given::split(command_line)?;
        let address = given.value("address").ok_or(ParameterError::NoAddress)?;
        let number = |name, default, least, most| given.number(name, default, least, most);
        Ok(Self {
            address: address.parse().map_err(|_| ParameterError::Address(address.to_owned()))?,
            memory_mib: match given.value("memory_mib") {
                Some(_) => Some(number("memory_mib", 1, 1, 1 << 24)?),
                None => None,
            },
            mix: given.value("mix").map_or(Ok(Mix::only(Kind::Random)), str::parse)?,
            seed: number("seed", 0, 0, u64::MAX)?,
            dirtying: Dirtying {
                mib_per_s: small(number("dirty_mib_per_s", 0, 0, u64::from(MIB_PER_S_MAX))?),
                locality_percent: small(number("locality", 100, 1, 100)?),
            },
            rewrite_words: small(number("rewrite_words", PAGE_WORDS as u64, 1, PAGE_WORDS as u64)?),
            disks: small(number("disks", 0, 0, DISKS_MAX)?),
        })
    }

    /// How many MiB to fill when so many are free.
    pub fn fill_mib(&self, available_mib: u64) -> Result<u64, ParameterError> {
        let most_mib = available_mib.saturating_sub(RESERVE_MIB);
        let asked_mib = self.memory_mib.unwrap_or((available_mib / 4 * 3).min(most_mib).max(1));
        if asked_mib > most_mib {
            return Err(ParameterError::Memory { asked_mib, available_mib });
        }
        Ok(asked_mib)
    }
}

/// As on the kernel command line; [`Parameters::parse`] reads it back.
impl fmt::Display for Parameters {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{PREFIX}address={}", self.address)?;
        if let Some(memory_mib) = self.memory_mib {
            write!(formatter, " {PREFIX}memory_mib={memory_mib}")?;
        }
        write!(
            formatter,
            " {PREFIX}mix={} {PREFIX}seed={} {PREFIX}dirty_mib_per_s={} {PREFIX}locality={} \
             {PREFIX}rewrite_words={} {PREFIX}disks={}",
            self.mix,
            self.seed,
            self.dirtying.mib_per_s,
            self.dirtying.locality_percent,
            self.rewrite_words,
            self.disks,
        )
    }
}

fn small<T: TryFrom<u64>>(number: u64) -> T
where
    T::Error: std::fmt::Debug,
{
    T::try_from(number).expect("the range was checked")
}

/// The parameters given, each once, without their prefix.
struct Given<'a>(Vec<(&'a str, &'a str)>);

const NAMES: [&str; 8] =
    ["address", "memory_mib", "mix", "seed", "dirty_mib_per_s", "locality", "rewrite_words", "disks"];

impl<'a> Given<'a> {
    fn split(command_line: &'a str) -> Result<Self, ParameterError> {
        let mut given = Self(Vec::new());
        for word in command_line.split_ascii_whitespace() {
            let Some(parameter) = word.strip_prefix(PREFIX) else { continue };
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            if !NAMES.contains(&name) {
                return Err(ParameterError::Unknown(format!("{PREFIX}{name}")));
            }
            if given.value(name).is_some() {
                return Err(ParameterError::Twice(format!("{PREFIX}{name}")));
            }
            given.0.push((name, value));
        }
        Ok(given)
    }

    fn value(&self, name: &str) -> Option<&'a str> {
        self.0.iter().find(|(given, _)| *given == name).map(|(_, value)| *value)
    }

    fn number(&self, name: &'static str, default: u64, least: u64, most: u64) -> Result<u64, ParameterError> {
        let Some(text) = self.value(name) else { return Ok(default) };
        let value = text.parse().map_err(|source| ParameterError::Number {
            name: format!("{PREFIX}{name}"),
            value: text.to_owned(),
            source,
        })?;
        if (least..=most).contains(&value) {
            Ok(value)
        } else {
            Err(ParameterError::Range { name, value, least, most })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn all_parameters_are_read_and_the_kernels_are_not() {
        let parameters = Parameters::parse(
            "console=ttyS0 drainpipe.address=10.1.2.3/24 quiet drainpipe.memory_mib=1536 \
             drainpipe.mix=zero:20,random:80 drainpipe.seed=18446744073709551615 \
             drainpipe.dirty_mib_per_s=50 drainpipe.locality=10 drainpipe.rewrite_words=8 \
             drainpipe.disks=2\n",
        );
        let expected = Parameters {
            address: "10.1.2.3/24".parse().unwrap(),
            memory_mib: Some(1536),
            mix: "zero:20,random:80".parse().unwrap(),
            seed: u64::MAX,
            dirtying: Dirtying { mib_per_s: 50, locality_percent: 10 },
            rewrite_words: 8,
            disks: 2,
        };
        assert_eq!(parameters, Ok(expected));
    }

    #[test]
    fn an_address_is_enough() {
        let parameters = Parameters::parse("drainpipe.address=10.0.0.2/24").unwrap();
        assert_eq!(parameters.mix, Mix::only(Kind::Random));
        assert_eq!(parameters.dirtying, Dirtying::IDLE);
        assert_eq!(parameters.fill_mib(2000), Ok(1500));
    }

    #[test]
    fn wrong_parameters_are_named() {
        let refusal = |text: &str| {
            let line = format!("drainpipe.address=10.0.0.2/24 {text}");
            Parameters::parse(&line).unwrap_err().to_string()
        };
        assert!(refusal("drainpipe.sed=1").contains("`drainpipe.sed`"));
        assert!(refusal("drainpipe.seed=1 drainpipe.seed=2").contains("twice"));
        assert!(refusal("drainpipe.locality=0").contains("from 1 to 100"));
        assert!(refusal("drainpipe.memory_mib=lots").contains("`lots`"));
        assert!(refusal("drainpipe.dirty_mib_per_s=").contains("whole number"));
        assert!(refusal("drainpipe.mix=random:99").contains("99 percent"));
        assert_eq!(Parameters::parse("quiet"), Err(ParameterError::NoAddress));
        let address = Parameters::parse("drainpipe.address=10.0.0.2");
        assert_eq!(address, Err(ParameterError::Address("10.0.0.2".into())));
    }

    #[test]
    fn more_memory_than_there_is_is_refused() {
        let parameters =
            Parameters::parse("drainpipe.address=10.0.0.2/24 drainpipe.memory_mib=1536").unwrap();
        assert_eq!(parameters.fill_mib(1584), Ok(1536));
        let refused = ParameterError::Memory { asked_mib: 1536, available_mib: 1583 };
        assert_eq!(parameters.fill_mib(1583), Err(refused));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(
            address: u32, prefix in 0..=32_u8, memory_mib in proptest::option::of(1..1_u64 << 24),
            random_percent in 0..=100_u8, seed: u64,
            mib_per_s in 0..=MIB_PER_S_MAX, locality_percent in 1..=100_u8, rewrite_words in 1..=PAGE_WORDS,
            disks in 0..=26_usize,
        ) {
            let mix = format!("random:{random_percent},text:{}", 100 - random_percent);
            let parameters = Parameters {
                address: Ipv4Net::new(address.into(), prefix).unwrap(),
                memory_mib,
                mix: mix.parse().unwrap(),
                seed,
                dirtying: Dirtying { mib_per_s, locality_percent },
                rewrite_words,
                disks,
            };
            let line = format!("{KERNEL_OPTIONS} {parameters}");
            prop_assert_eq!(Parameters::parse(&line), Ok(parameters));
        }

        #[test]
        fn any_command_line_is_read_or_refused(line in "(drainpipe\\.[a-z_]{0,15}=?[0-9a-z:,./]{0,20} ?){0,4}") {
            let _ = Parameters::parse(&line);
        }

        #[test]
        fn the_fill_always_leaves_the_reserve(available_mib in 0..1_u64 << 20) {
            let parameters = Parameters::parse("drainpipe.address=10.0.0.2/24").unwrap();
            match parameters.fill_mib(available_mib) {
                Ok(fill_mib) => prop_assert!(fill_mib + RESERVE_MIB <= available_mib),
                Err(_) => prop_assert!(available_mib <= RESERVE_MIB),
            }
        }
    }
}
