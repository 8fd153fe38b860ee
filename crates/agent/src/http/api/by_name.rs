//! Reads objects by the names of their fields. serde's derived types also take a list of the values in their order, which
//! the OpenAPI document does not have: to them, an empty list is a request with a default for everything.

use std::fmt;

use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, EnumAccess, Error, MapAccess, SeqAccess, Unexpected,
    VariantAccess, Visitor,
};

/// A value, or what it is read from, whose objects have their fields by name.
pub(super) struct ByName<T>(pub(super) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for ByName<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        T::deserialize(ByName(deserializer)).map(Self)
    }
}

/// Takes one value.
struct Taker<V> {
    visitor: V,
    takes_lists: bool,
}

fn taker<V>(visitor: V) -> Taker<V> {
    Taker { visitor, takes_lists: true }
}

/// Passes the reading of values on, each given as its method and further arguments.
macro_rules! pass_on_reading {
    ($($method:ident($($argument:ident: $kind:ty),*))*) => {$(
        fn $method<V: Visitor<'de>>(self, $($argument: $kind,)* visitor: V) -> Result<V::Value, D::Error> {
            self.0.$method($($argument,)* taker(visitor))
        }
    )*};
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for ByName<D> {
    type Error = D::Error;

    /// Only enums whose variant a field names are read so. They would take a list too; none of their variants has one.
    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.0.deserialize_any(Taker { visitor, takes_lists: false })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.deserialize_map(visitor)
    }

    pass_on_reading! {
        deserialize_bool() deserialize_char() deserialize_str() deserialize_string()
        deserialize_i8() deserialize_i16() deserialize_i32() deserialize_i64() deserialize_i128()
        deserialize_u8() deserialize_u16() deserialize_u32() deserialize_u64() deserialize_u128()
        deserialize_f32() deserialize_f64() deserialize_bytes() deserialize_byte_buf()
        deserialize_option() deserialize_unit() deserialize_seq() deserialize_map()
        deserialize_identifier() deserialize_ignored_any()
        deserialize_unit_struct(name: &'static str)
        deserialize_newtype_struct(name: &'static str)
        deserialize_tuple(length: usize)
        deserialize_tuple_struct(name: &'static str, length: usize)
        deserialize_enum(name: &'static str, variants: &'static [&'static str])
    }

    fn is_human_readable(&self) -> bool {
        self.0.is_human_readable()
    }
}

/// Passes simple values on, each given as its method and type.
macro_rules! pass_on_values {
    ($($method:ident($kind:ty))*) => {$(
        fn $method<E: Error>(self, value: $kind) -> Result<V::Value, E> {
            self.visitor.$method(value)
        }
    )*};
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Taker<V> {
    type Value = V::Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.visitor.expecting(formatter)
    }

    pass_on_values! {
        visit_bool(bool) visit_char(char) visit_str(&str) visit_borrowed_str(&'de str) visit_string(String)
        visit_i8(i8) visit_i16(i16) visit_i32(i32) visit_i64(i64) visit_i128(i128)
        visit_u8(u8) visit_u16(u16) visit_u32(u32) visit_u64(u64) visit_u128(u128)
        visit_f32(f32) visit_f64(f64)
        visit_bytes(&[u8]) visit_borrowed_bytes(&'de [u8]) visit_byte_buf(Vec<u8>)
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.visitor.visit_unit()
    }

    fn visit_none<E: Error>(self) -> Result<V::Value, E> {
        self.visitor.visit_none()
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        self.visitor.visit_some(ByName(deserializer))
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        self.visitor.visit_newtype_struct(ByName(deserializer))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<V::Value, A::Error> {
        if self.takes_lists {
            self.visitor.visit_seq(ByName(list))
        } else {
            Err(A::Error::invalid_type(Unexpected::Seq, &self.visitor))
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<V::Value, A::Error> {
        self.visitor.visit_map(ByName(map))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, data: A) -> Result<V::Value, A::Error> {
        self.visitor.visit_enum(ByName(data))
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for ByName<S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<S::Value, D::Error> {
        self.0.deserialize(ByName(deserializer))
    }
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for ByName<A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        self.0.next_element_seed(ByName(seed))
    }

    fn size_hint(&self) -> Option<usize> {
        self.0.size_hint()
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for ByName<A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        self.0.next_key_seed(seed)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        self.0.next_value_seed(ByName(seed))
    }

    fn size_hint(&self) -> Option<usize> {
        self.0.size_hint()
    }
}

impl<'de, A: EnumAccess<'de>> EnumAccess<'de> for ByName<A> {
    type Error = A::Error;
    type Variant = ByName<A::Variant>;

    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, Self::Variant), A::Error> {
        let (value, variant) = self.0.variant_seed(seed)?;
        Ok((value, ByName(variant)))
    }
}

impl<'de, A: VariantAccess<'de>> VariantAccess<'de> for ByName<A> {
    type Error = A::Error;

    fn unit_variant(self) -> Result<(), A::Error> {
        self.0.unit_variant()
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, A::Error> {
        self.0.newtype_variant_seed(ByName(seed))
    }

    fn tuple_variant<V: Visitor<'de>>(self, length: usize, visitor: V) -> Result<V::Value, A::Error> {
        self.0.tuple_variant(length, taker(visitor))
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, A::Error> {
        self.0.newtype_variant_seed(Fields(visitor))
    }
}

/// The fields of a variant.
struct Fields<V>(V);

impl<'de, V: Visitor<'de>> DeserializeSeed<'de> for Fields<V> {
    type Value = V::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        ByName(deserializer).deserialize_map(self.0)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::net::IpAddr;

    use serde::{Deserialize, Serialize};
    use serde_json::{Value, json};

    use super::ByName;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Request {
        #[serde(default)]
        count: u64,
        #[serde(default)]
        address: Option<IpAddr>,
        #[serde(default)]
        pairs: Vec<(String, Part)>,
        #[serde(default)]
        parts: BTreeMap<String, Part>,
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Part {
        Plain,
        Of(Box<Request>),
        Both(u8, f64),
        Named { size: u8 },
        Tagged(Tagged),
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case", tag = "by")]
    enum Tagged {
        Size { size: u8 },
    }

    fn read(json: &Value) -> Result<Request, serde_json::Error> {
        serde_json::from_str::<ByName<Request>>(&json.to_string()).map(|read| read.0)
    }

    #[test]
    fn what_has_names_is_read_as_ever() {
        let inner = json!({ "count": 1, "address": null, "pairs": [], "parts": {} });
        let parts = json!({
            "a": "plain", "b": { "of": inner }, "c": { "both": [1, 0.5] }, "d": { "named": { "size": 1 } },
            "e": { "tagged": { "by": "size", "size": 2 } },
        });
        let request =
            json!({ "count": 7, "address": "10.0.0.1", "pairs": [["x", { "of": inner }]], "parts": parts });
        let ours = read(&request).unwrap();
        assert_eq!(ours, serde_json::from_value(request.clone()).unwrap());
        assert_eq!(serde_json::to_value(ours).unwrap(), request);
        assert!(read(&json!({ "cuont": 7 })).unwrap_err().to_string().contains("cuont"));
    }

    #[test]
    fn a_list_in_place_of_an_object_is_refused_wherever_it_is() {
        let part = |part: Value| json!({ "parts": { "a": part } });
        for list in [
            json!([]),
            json!([7]),
            part(json!({ "of": [] })),
            part(json!({ "named": [1] })),
            part(json!({ "tagged": ["size", 2] })),
            json!({ "pairs": [["x", { "of": [1] }]] }),
        ] {
            assert!(
                serde_json::from_str::<Request>(&list.to_string()).is_ok(),
                "serde takes {list} by itself"
            );
            assert!(read(&list).unwrap_err().to_string().contains("invalid type: sequence"), "{list}");
        }
    }
}
