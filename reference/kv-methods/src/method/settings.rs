//! `key=value` settings: parsing, and printing in a form that parses again.

use std::fmt::Display;
use std::str::FromStr;

use super::Place;
use crate::{Error, Result};

/// Maximum token count of a setting.
const MOST_TOKENS: u32 = 1 << 24;

/// Maximum bytes of a token.
const MOST_BYTES: u32 = 1 << 30;

/// The `key=value` pairs of a method, taken one by one.
pub(super) struct Settings<'a> {
    pub name: &'a str,
    pub head_dim: usize, // that defaults are based on
    pub place: Place,    // the same
    left: Vec<(&'a str, &'a str)>,
    known: Vec<&'static str>,
    shown: Vec<String>, // the parts of `Method::setting`
}

impl<'a> Settings<'a> {
    pub fn new(spec: &'a str, head_dim: usize, place: Place) -> Result<Self> {
        let mut parts = spec.split(':');
        let name = parts.next().unwrap_or_default();
        let left = parts.map(|part| part.split_once('=')).collect::<Option<Vec<_>>>().ok_or_else(|| {
            Error::Argument(format!("method `{spec}`: settings are KEY=VALUE after colons"))
        })?;
        Ok(Self { name, head_dim, place, left, known: vec![], shown: vec![] })
    }

    fn take<T: FromStr<Err: Display>>(&mut self, key: &'static str) -> Result<Option<T>> {
        if !self.known.contains(&key) {
            self.known.push(key);
        }
        let Some(at) = self.left.iter().position(|(k, _)| *k == key) else { return Ok(None) };
        let (_, value) = self.left.swap_remove(at);
        if self.is_given(key) {
            return Err(self.refused(format_args!("`{key}` is given twice")));
        }
        match value.parse() {
            Ok(value) => Ok(Some(value)),
            Err(what) => Err(self.refused(format_args!("{key}={value}: {what}"))),
        }
    }

    fn is_given(&self, key: &str) -> bool {
        self.left.iter().any(|(k, _)| *k == key)
    }

    fn refused(&self, what: impl Display) -> Error {
        Error::Argument(format!("method {}: {what}", self.name))
    }

    /// Whether the first of two mutually exclusive settings is given.
    pub fn is_first(&mut self, [first, second]: [&'static str; 2]) -> Result<bool> {
        self.known.extend([first, second]);
        match (self.is_given(first), self.is_given(second)) {
            (true, true) => Err(self.refused(format_args!("give `{first}` or `{second}`, not both"))),
            (given, _) => Ok(given),
        }
    }

    /// Rejects settings that require another one that is not given.
    pub fn need(&self, keys: &[&str], other: &str) -> Result<()> {
        match keys.iter().find(|key| self.is_given(key)) {
            Some(key) => Err(self.refused(format_args!("`{key}` has no effect without {other}"))),
            None => Ok(()),
        }
    }

    /// A method-specific setting: always shown.
    pub fn own<T: FromStr<Err: Display> + Display>(&mut self, key: &'static str, default: T) -> Result<T> {
        self.resolved(key, default, |value| value)
    }

    /// A method-specific setting that depends on the model: shown as `resolve` returns it.
    pub fn resolved<T: FromStr<Err: Display>, U: Display>(
        &mut self,
        key: &'static str,
        default: T,
        resolve: impl FnOnce(T) -> U,
    ) -> Result<U> {
        let value = resolve(self.take(key)?.unwrap_or(default));
        self.shown.push(format!("{key}={value}"));
        Ok(value)
    }

    /// A setting that is shown only when given.
    pub fn common<T: FromStr<Err: Display> + Display>(&mut self, key: &'static str, default: T) -> Result<T> {
        Ok(self.given(key)?.unwrap_or(default))
    }

    /// An optional setting, shown when given.
    pub fn given<T: FromStr<Err: Display> + Display>(&mut self, key: &'static str) -> Result<Option<T>> {
        let value = self.take(key)?;
        if let Some(value) = &value {
            self.shown.push(format!("{key}={value}"));
        }
        Ok(value)
    }

    /// Bits of a code.
    pub fn bits(&mut self, key: &'static str, default: u32) -> Result<u32> {
        Ok(self.own(key, Within::<u32, 1, 8>(default))?.0)
    }

    /// A count of tokens, which may be 0.
    pub fn tokens(&mut self, key: &'static str, default: usize) -> Result<usize> {
        Ok(self.common(key, Within::<usize, 0, MOST_TOKENS>(default))?.0)
    }

    /// An optional count of tokens, which may be 0.
    pub fn given_tokens(&mut self, key: &'static str) -> Result<Option<usize>> {
        Ok(self.given::<Within<usize, 0, MOST_TOKENS>>(key)?.map(|count| count.0))
    }

    /// A count of tokens, at least one.
    pub fn some_tokens(&mut self, key: &'static str, default: usize) -> Result<usize> {
        Ok(self.common(key, Within::<usize, 1, MOST_TOKENS>(default))?.0)
    }

    /// A count of at least one.
    pub fn positive(&mut self, key: &'static str, default: usize) -> Result<usize> {
        Ok(self.own(key, Within::<usize, 1, 4096>(default))?.0)
    }

    /// A count, shown only when given.
    pub fn count(&mut self, key: &'static str, default: usize) -> Result<usize> {
        Ok(self.common(key, Within::<usize, 0, 4096>(default))?.0)
    }

    /// A count of at least one, shown only when given.
    pub fn common_count(&mut self, key: &'static str, default: usize) -> Result<usize> {
        Ok(self.common(key, Within::<usize, 1, 4096>(default))?.0)
    }

    /// A fraction, shown only when given.
    pub fn common_part(&mut self, key: &'static str, default: f64) -> Result<f64> {
        Ok(self.common(key, Within::<f64, 0, 1>(default))?.0)
    }

    /// A percentage, shown only when given.
    pub fn percent(&mut self, key: &'static str, default: usize) -> Result<usize> {
        Ok(self.common(key, Within::<usize, 0, 100>(default))?.0)
    }

    /// A fraction: above 0, at most 1.
    pub fn fraction(&mut self, key: &'static str, default: f64) -> Result<f64> {
        Ok(self.own(key, Within::<f64, 0, 1>(default))?.0)
    }

    /// Mean bits of a component: above 0.
    pub fn mean_bits(&mut self, key: &'static str, default: f64) -> Result<f64> {
        Ok(self.own(key, Within::<f64, 0, 8>(default))?.0)
    }

    /// Bytes of a token, which must be given.
    pub fn bytes(&mut self, key: &'static str) -> Result<usize> {
        Ok(self.own(key, Within::<usize, 1, MOST_BYTES>(1))?.0)
    }

    /// A bin size in standard deviations.
    pub fn bin(&mut self, key: &'static str, default: f32) -> Result<f32> {
        Ok(self.own(key, Within::<f32, 0, 100>(default))?.0)
    }

    /// LMCache's number of bins.
    pub fn bins(&mut self, key: &'static str, default: u8) -> Result<u8> {
        Ok(self.own(key, Within::<u32, 4, 64>(default.into()))?.0 as u8)
    }

    /// The settings in a form that parses again.
    pub fn shown(&self) -> String {
        self.shown.join(":")
    }

    /// Rejects settings that were not taken.
    pub fn finish(&self) -> Result<()> {
        match self.left.first() {
            Some((key, _)) => {
                let known = self.known.join(", ");
                Err(self.refused(format_args!("unknown setting `{key}`; known: {known}")))
            }
            None => Ok(()),
        }
    }
}

/// A number in a range; integers may equal the lower bound, fractions must exceed it.
#[derive(Clone, Copy)]
struct Within<T, const LOW: u32, const HIGH: u32>(T);

macro_rules! within {
    ($type:ty, $low:tt, $range:literal) => {
        impl<const LOW: u32, const HIGH: u32> FromStr for Within<$type, LOW, HIGH> {
            type Err = String;
            fn from_str(text: &str) -> std::result::Result<Self, String> {
                match text.parse::<$type>() {
                    Ok(value) if value $low LOW as $type && value <= HIGH as $type => Ok(Self(value)),
                    _ => Err(format!($range, LOW, HIGH)),
                }
            }
        }
        impl<const LOW: u32, const HIGH: u32> Display for Within<$type, LOW, HIGH> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}
within!(u32, >=, "must be a whole number from {} to {}");
within!(usize, >=, "must be a whole number from {} to {}");
within!(f64, >, "must be a number above {} and at most {}");
within!(f32, >, "must be a number above {} and at most {}");

/// Defines the command-line spellings of an enum.
macro_rules! words {
    ($type:ty, $($word:literal => $value:path),+) => {
        impl std::str::FromStr for $type {
            type Err = String;
            fn from_str(text: &str) -> std::result::Result<Self, String> {
                match text {
                    $($word => Ok($value.into()),)+
                    _ => Err(format!("must be one of {}", [$($word),+].join(", "))),
                }
            }
        }
        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                $(if *self == <$type>::from($value) {
                    return f.write_str($word);
                })+
                Ok(())
            }
        }
    };
}
pub(super) use words;

words!(Switch, "on" => Switch::On, "off" => Switch::Off);

/// A choice between on and off.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Switch {
    On,
    Off,
}

/// A number of bits, possibly negative or zero.
#[derive(Clone, Copy)]
pub(super) struct Bits(pub f32);

impl FromStr for Bits {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let bits = text.parse().ok().filter(|x: &f32| (-8.0..=8.0).contains(x));
        bits.map(Self).ok_or_else(|| "must be a number of bits from -8 to 8".into())
    }
}

impl Display for Bits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Bits per code, 1 to 8, or none for uncoded rows.
#[derive(Clone, Copy)]
pub(super) struct OptionalBits(pub Option<u32>);

impl FromStr for OptionalBits {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        Ok(Self(Some(Within::<u32, 1, 8>::from_str(text)?.0)))
    }
}

impl Display for OptionalBits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.map_or(Ok(()), |bits| bits.fmt(f))
    }
}

/// A list of layers: `0+5`.
#[derive(Clone)]
pub(super) struct Layers(pub Vec<usize>);

impl FromStr for Layers {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let layers = text.split('+').map(str::parse).collect::<std::result::Result<_, _>>();
        layers.map(Self).map_err(|_| "must be a list of layers, like 0+5".into())
    }
}

impl Display for Layers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.iter().map(usize::to_string).collect::<Vec<_>>().join("+"))
    }
}
