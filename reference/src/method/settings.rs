//! `key=value` settings: parsing them, and writing them so that they parse again.

use std::fmt::Display;
use std::str::FromStr;

use crate::cache::ElementType;
use crate::{Error, Result};

/// The `key=value` pairs of a method, taken one by one.
pub(super) struct Settings<'a> {
    pub name: &'a str,
    pub head_dim: usize, // for which defaults are made
    left: Vec<(&'a str, &'a str)>,
    known: Vec<&'static str>,
    shown: Vec<String>, // the parts of `Method::setting`
}

impl<'a> Settings<'a> {
    pub fn new(spec: &'a str, head_dim: usize) -> Result<Self> {
        let mut parts = spec.split(':');
        let name = parts.next().unwrap_or_default();
        let left = parts.map(|part| part.split_once('=')).collect::<Option<Vec<_>>>().ok_or_else(|| {
            Error::Argument(format!("method `{spec}`: settings are KEY=VALUE after colons"))
        })?;
        Ok(Self { name, head_dim, left, known: vec![], shown: vec![] })
    }

    fn take<T: FromStr<Err = String>>(&mut self, key: &'static str, default: T) -> Result<(T, bool)> {
        self.known.push(key);
        let Some(at) = self.left.iter().position(|(k, _)| *k == key) else { return Ok((default, false)) };
        let (_, value) = self.left.swap_remove(at);
        if self.left.iter().any(|(k, _)| *k == key) {
            return Err(Error::Argument(format!("method {}: `{key}` is given twice", self.name)));
        }
        match value.parse() {
            Ok(value) => Ok((value, true)),
            Err(what) => Err(Error::Argument(format!("method {}: {key}={value}: {what}", self.name))),
        }
    }

    /// A setting of the method itself: always shown.
    pub fn own<T: FromStr<Err = String> + Display>(&mut self, key: &'static str, default: T) -> Result<T> {
        self.resolved(key, default, |value| value)
    }

    /// A setting of the method itself that means something else for every model: shown as `resolve` gives it.
    pub fn resolved<T: FromStr<Err = String>, U: Display>(
        &mut self,
        key: &'static str,
        default: T,
        resolve: impl FnOnce(T) -> U,
    ) -> Result<U> {
        let value = resolve(self.take(key, default)?.0);
        self.shown.push(format!("{key}={value}"));
        Ok(value)
    }

    /// A setting with a default that few change: shown when given.
    pub fn common<T: FromStr<Err = String> + Display>(&mut self, key: &'static str, default: T) -> Result<T> {
        let (value, given) = self.take(key, default)?;
        if given {
            self.shown.push(format!("{key}={value}"));
        }
        Ok(value)
    }

    /// Bits of a code.
    pub fn bits(&mut self, key: &'static str, default: u32) -> Result<u32> {
        Ok(self.own(key, Within::<u32, 1, 8>(default))?.0)
    }

    /// A count of tokens: a setting of all methods.
    pub fn tokens(&mut self, key: &'static str, default: usize) -> Result<usize> {
        Ok(self.common(key, Within::<usize, 0, 0x100_0000>(default))?.0)
    }

    /// A count of at least one.
    pub fn positive(&mut self, key: &'static str, default: usize) -> Result<usize> {
        Ok(self.own(key, Within::<usize, 1, 4096>(default))?.0)
    }

    /// A count that is shown when it is given.
    pub fn count(&mut self, key: &'static str, default: usize) -> Result<usize> {
        Ok(self.common(key, Within::<usize, 0, 4096>(default))?.0)
    }

    /// A count of at least one that is shown when it is given.
    pub fn common_count(&mut self, key: &'static str, default: usize) -> Result<usize> {
        Ok(self.common(key, Within::<usize, 1, 4096>(default))?.0)
    }

    /// A fraction that is shown when it is given.
    pub fn common_part(&mut self, key: &'static str, default: f64) -> Result<f64> {
        Ok(self.common(key, Within::<f64, 0, 1>(default))?.0)
    }

    /// A percentage that is shown when it is given.
    pub fn percent(&mut self, key: &'static str, default: usize) -> Result<usize> {
        Ok(self.common(key, Within::<usize, 0, 100>(default))?.0)
    }

    /// A fraction: above 0, at most 1.
    pub fn fraction(&mut self, key: &'static str, default: f64) -> Result<f64> {
        Ok(self.own(key, Within::<f64, 0, 1>(default))?.0)
    }

    /// A bin size in deviations.
    pub fn bin(&mut self, key: &'static str, default: f32) -> Result<f32> {
        Ok(self.own(key, Within::<f32, 0, 100>(default))?.0)
    }

    /// LMCache's bins.
    pub fn bins(&mut self, key: &'static str, default: u8) -> Result<u8> {
        Ok(self.own(key, Within::<u32, 4, 64>(default.into()))?.0 as u8)
    }

    /// The settings in the form that parses again.
    pub fn shown(&self) -> String {
        self.shown.join(":")
    }

    /// Refuses settings that nothing has taken.
    pub fn finish(&self) -> Result<()> {
        match self.left.first() {
            Some((key, _)) => Err(Error::Argument(format!(
                "method {} has no setting `{key}`, or has another one in its place; it has {}",
                self.name,
                self.known.join(", ")
            ))),
            None => Ok(()),
        }
    }
}

/// A number between two bounds; whole numbers may equal the lower one, fractions must exceed it.
#[derive(Clone, Copy)]
struct Within<T, const LOW: u32, const HIGH: u32>(T);

macro_rules! within {
    ($type:ty, $low:tt) => {
        impl<const LOW: u32, const HIGH: u32> FromStr for Within<$type, LOW, HIGH> {
            type Err = String;
            fn from_str(text: &str) -> std::result::Result<Self, String> {
                let value: $type = text.parse().map_err(|_| "is not a number".to_owned())?;
                if value $low LOW as $type && value <= HIGH as $type {
                    Ok(Self(value))
                } else {
                    Err(format!("is not {} {LOW} and at most {HIGH}", stringify!($low)))
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
within!(u32, >=);
within!(usize, >=);
within!(f64, >);
within!(f32, >);

/// Gives an enum its words on the command line.
macro_rules! words {
    ($type:ty, $($word:literal => $value:path),+) => {
        impl std::str::FromStr for $type {
            type Err = String;
            fn from_str(text: &str) -> std::result::Result<Self, String> {
                match text {
                    $($word => Ok($value.into()),)+
                    _ => Err(format!("is none of {}", [$($word),+].join(", "))),
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

words!(ElementType, "f32" => ElementType::F32, "f16" => ElementType::F16, "bf16" => ElementType::Bf16);
words!(Switch, "on" => Switch::On, "off" => Switch::Off);

/// A choice between on and off.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Switch {
    On,
    Off,
}

/// Bits that may be negative or none.
#[derive(Clone, Copy)]
pub(super) struct Bits(pub f32);

impl FromStr for Bits {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let bits = text.parse().ok().filter(|x: &f32| (-8.0..=8.0).contains(x));
        bits.map(Self).ok_or_else(|| "is not a number of bits from -8 to 8".into())
    }
}

impl Display for Bits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Bits of a code, 1 to 8, or none for rows that are not coded.
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
        layers.map(Self).map_err(|_| "is not a list of layers, like 0+5".into())
    }
}

impl Display for Layers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.iter().map(usize::to_string).collect::<Vec<_>>().join("+"))
    }
}
