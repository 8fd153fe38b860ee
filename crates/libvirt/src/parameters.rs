use crate::xdr::{Decode, Decoder, Encode, Encoder, Malformed};

/// Parameters of a migration at most (`REMOTE_DOMAIN_MIGRATE_PARAM_LIST_MAX`), and of a job's figures.
pub(crate) const PARAMETERS_MAX: usize = 64;

/// A value that has a name and says what type it is: libvirt's "typed parameter".
#[derive(Debug, Clone, PartialEq)]
pub struct Parameter {
    /// Its name in libvirt.
    pub name: String,
    /// Its value.
    pub value: Value,
}

/// The value of a [`Parameter`]. libvirt refuses one whose type is not the one that belongs to its name.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "they are what they are called")]
pub enum Value {
    Int(i32),
    UInt(u32),
    Long(i64),
    ULong(u64),
    Double(f64),
    Boolean(bool),
    String(String),
}

impl Parameter {
    /// A text.
    pub fn text(name: &str, text: impl Into<String>) -> Self {
        Self { name: name.into(), value: Value::String(text.into()) }
    }

    /// A whole number, as most figures of a migration are.
    pub fn int(name: &str, number: i32) -> Self {
        Self { name: name.into(), value: Value::Int(number) }
    }

    /// A large whole number, as speeds are.
    pub fn large(name: &str, number: u64) -> Self {
        Self { name: name.into(), value: Value::ULong(number) }
    }
}

impl Value {
    /// A whole number that is not negative, whatever its type.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Int(number) => (*number).try_into().ok(),
            Self::UInt(number) => Some((*number).into()),
            Self::Long(number) => (*number).try_into().ok(),
            Self::ULong(number) => Some(*number),
            _ => None,
        }
    }
}

impl Encode for Parameter {
    fn encode(&self, to: &mut Encoder) {
        to.text(&self.name);
        to.u32(self.value.number_of_type());
        match &self.value {
            Value::Int(number) => to.i32(*number),
            Value::UInt(number) => to.u32(*number),
            Value::Long(number) => to.i64(*number),
            Value::ULong(number) => to.u64(*number),
            Value::Double(number) => to.f64(*number),
            Value::Boolean(it_is) => to.bool(*it_is),
            Value::String(text) => to.text(text),
        }
    }
}

impl Value {
    fn number_of_type(&self) -> u32 {
        match self {
            Self::Int(_) => 1,
            Self::UInt(_) => 2,
            Self::Long(_) => 3,
            Self::ULong(_) => 4,
            Self::Double(_) => 5,
            Self::Boolean(_) => 6,
            Self::String(_) => 7,
        }
    }
}

impl Decode for Parameter {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        let name = from.text()?;
        let value = match from.u32()? {
            1 => Value::Int(from.i32()?),
            2 => Value::UInt(from.u32()?),
            3 => Value::Long(from.i64()?),
            4 => Value::ULong(from.u64()?),
            5 => Value::Double(from.f64()?),
            6 => Value::Boolean(from.truth()?),
            7 => Value::String(from.text()?),
            number => return Err(Malformed::Unknown { what: "type of a parameter", number: number.into() }),
        };
        Ok(Self { name, value })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn values() -> impl Strategy<Value = Value> {
        prop_oneof![
            any::<i32>().prop_map(Value::Int),
            any::<u32>().prop_map(Value::UInt),
            any::<i64>().prop_map(Value::Long),
            any::<u64>().prop_map(Value::ULong),
            (-1e9..1e9).prop_map(Value::Double),
            any::<bool>().prop_map(Value::Boolean),
            ".{0,20}".prop_map(Value::String),
        ]
    }

    #[test]
    fn numbers_are_read_whatever_their_type() {
        assert_eq!(Value::Int(5).as_u64(), Some(5));
        assert_eq!(Value::ULong(5).as_u64(), Some(5));
        assert_eq!(Value::Long(-5).as_u64(), None);
        assert_eq!(Value::Boolean(true).as_u64(), None);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(name in "[a-z_.]{1,20}", value in values()) {
            let parameter = Parameter { name, value };
            let mut to = Encoder::default();
            parameter.encode(&mut to);
            prop_assert_eq!(Decoder::whole(&to.finish().unwrap()), Ok(parameter));
        }
    }
}
