//! Expansion of `#[derive(Batch)]`, with its errors.

use proc_macro2::TokenStream;
use quote::{quote, quote_spanned};
use syn::spanned::Spanned;
use syn::visit_mut::{VisitMut, visit_type_mut};
use syn::{
    Data, DeriveInput, Error, Fields, GenericParam, Generics, Ident, LitStr, Member, Path, Result,
    Type, parse_quote,
};

/// Expands the derive for one type.
pub(crate) fn expand(input: &DeriveInput) -> Result<TokenStream> {
    let krate = crate_path(input)?;
    let fields = fields(input)?;
    if let Some(lifetime) = input.generics.lifetimes().next() {
        let message = "a batch must own its tensors: replace references by `Tensor`, whose clone \
                       (`shallow_clone`) shares the memory";
        return Err(Error::new(lifetime.span(), message));
    }
    let name = &input.ident;
    let members: Vec<Member> = fields.members().collect();
    let types: Vec<&Type> = fields.iter().map(|field| &field.ty).collect();
    let count = members.len();
    let index = 0..count;

    let tree = quote!(#krate::__derive::TensorTree);
    let collate = quote!(#krate::__derive::Collate);
    let error = quote!(#krate::__derive::Error);
    let spec = quote!(#krate::__derive::TreeSpec);
    let tensor = quote!(#krate::__derive::Tensor);

    // A missing implementation is reported at the field's type.
    let visits = each(
        &members,
        &types,
        |member, ty| quote_spanned!(ty.span()=> <#ty as #tree>::visit(&self.#member, f);),
    );
    let maps = each(
        &members,
        &types,
        |member, ty| quote_spanned!(ty.span()=> #member: <#ty as #tree>::try_map(&self.#member, f)?,),
    );
    let specs = each(
        &members,
        &types,
        |member, ty| quote_spanned!(ty.span()=> <#ty as #tree>::spec(&self.#member),),
    );
    let built = members.iter().zip(&types).zip(index).map(|((member, ty), index)| {
        quote_spanned!(ty.span()=> #member: <#ty as #tree>::from_spec(&parts[#index], tensors)?,)
    });
    let collated = each(&members, &types, |member, ty| {
        let column = quote!(samples.iter().map(|sample| &sample.#member));
        quote_spanned!(ty.span()=>
            #member: <#ty as #collate>::collate(&#column.collect::<::std::vec::Vec<_>>())?,
        )
    });

    let trees = bounded(&input.generics, &tree);
    let (tree_impl, ty_generics, tree_where) = trees.split_for_impl();
    let owned = replaced(&input.generics, |param| parse_quote!(<#param as #tree>::Owned));
    let mut samples = bounded(&input.generics, &collate);
    // The batch of a list of a type parameter is a list of batches for tensors, and one tensor for numbers: only the
    // former fits the field.
    for ty in &types {
        let mut batch = (*ty).clone();
        let mut collated = Collated { generics: &input.generics, collate: &collate, found: false };
        collated.visit_type_mut(&mut batch);
        if collated.found && !is_parameter(ty, &input.generics) {
            let predicate = parse_quote!(#ty: #collate<Batch = #batch>);
            samples.make_where_clause().predicates.push(predicate);
        }
    }
    let (sample_impl, _, sample_where) = samples.split_for_impl();
    let batch = replaced(&input.generics, |param| parse_quote!(<#param as #collate>::Batch));

    Ok(quote! {
        #[automatically_derived]
        impl #tree_impl #tree for #name #ty_generics #tree_where {
            type Owned = #name #owned;

            fn visit<'__tensors>(
                &'__tensors self,
                f: &mut dyn ::core::ops::FnMut(&'__tensors #tensor),
            ) {
                #(#visits)*
            }

            fn try_map<__E>(
                &self,
                f: &mut dyn ::core::ops::FnMut(&#tensor) -> ::core::result::Result<#tensor, __E>,
            ) -> ::core::result::Result<Self::Owned, __E> {
                ::core::result::Result::Ok(#name { #(#maps)* })
            }

            fn spec(&self) -> #spec {
                #spec::Tuple(::std::vec![#(#specs)*])
            }

            fn from_spec(
                spec: &#spec,
                tensors: &mut dyn ::core::iter::Iterator<Item = #tensor>,
            ) -> ::core::result::Result<Self::Owned, #error> {
                let parts = spec.tuple(#count)?;
                ::core::result::Result::Ok(#name { #(#built)* })
            }
        }

        #[automatically_derived]
        impl #sample_impl #collate for #name #ty_generics #sample_where {
            type Batch = #name #batch;

            fn collate(
                samples: &[&Self],
            ) -> ::core::result::Result<Self::Batch, #krate::__derive::Error> {
                ::core::result::Result::Ok(#name { #(#collated)* })
            }
        }

        #[automatically_derived]
        impl #tree_impl #krate::__derive::Split for #name #ty_generics #tree_where {
            type Part = <Self as #tree>::Owned;

            fn length(&self) -> ::core::result::Result<usize, #error> {
                #tree::rows(self)
            }

            fn part(
                &self,
                range: ::core::ops::Range<usize>,
                repeats: usize,
            ) -> ::core::result::Result<Self::Part, #error> {
                #tree::try_map(self, &mut |tensor| {
                    #krate::__derive::Split::part(tensor, range.clone(), repeats)
                })
            }
        }
    })
}

fn each(
    members: &[Member],
    types: &[&Type],
    f: impl Fn(&Member, &Type) -> TokenStream,
) -> Vec<TokenStream> {
    members.iter().zip(types).map(|(member, ty)| f(member, ty)).collect()
}

/// Returns the fields of a struct; for another type an error at its keyword.
fn fields(input: &DeriveInput) -> Result<&Fields> {
    let refuse = |span, message: &str| Err(Error::new(span, format!("derive(Batch): {message}")));
    match &input.data {
        Data::Struct(data) if data.fields.is_empty() => refuse(
            input.ident.span(),
            "expected a struct with at least one field, found none: a batch without tensors has no rows",
        ),
        Data::Struct(data) => Ok(&data.fields),
        Data::Enum(data) => refuse(
            data.enum_token.span,
            "expected a struct, found an enum: samples of different variants cannot be stacked; use a \
             struct, with `Option` for what only some batches have",
        ),
        Data::Union(data) => refuse(
            data.union_token.span,
            "expected a struct, found a union: which of its fields holds a tensor is unknown",
        ),
    }
}

/// Returns the path of the crate that has the traits: `::brigade`, or that of `#[batch(crate = "…")]`.
fn crate_path(input: &DeriveInput) -> Result<Path> {
    let mut path = parse_quote!(::brigade);
    for attribute in input.attrs.iter().filter(|attribute| attribute.path().is_ident("batch")) {
        attribute.parse_nested_meta(|meta| {
            if !meta.path.is_ident("crate") {
                return Err(meta.error("derive(Batch): expected `crate = \"…\"`"));
            }
            path = meta.value()?.parse::<LitStr>()?.parse()?;
            Ok(())
        })?;
    }
    for field in fields(input)? {
        if let Some(attribute) = field.attrs.iter().find(|one| one.path().is_ident("batch")) {
            let message = "derive(Batch): fields have no options; every field is a tensor or a tree of \
                           tensors";
            return Err(Error::new(attribute.span(), message));
        }
    }
    Ok(path)
}

/// Replaces type parameters by their types in a batch.
struct Collated<'a> {
    generics: &'a Generics,
    collate: &'a TokenStream,
    found: bool,
}

impl VisitMut for Collated<'_> {
    fn visit_type_mut(&mut self, ty: &mut Type) {
        if is_parameter(ty, self.generics) {
            let collate = self.collate;
            self.found = true;
            *ty = parse_quote!(<#ty as #collate>::Batch);
        } else {
            visit_type_mut(self, ty);
        }
    }
}

fn is_parameter(ty: &Type, generics: &Generics) -> bool {
    let Type::Path(path) = ty else { return false };
    path.qself.is_none() && generics.type_params().any(|param| path.path.is_ident(&param.ident))
}

/// Adds a bound on every type parameter.
fn bounded(generics: &Generics, bound: &TokenStream) -> Generics {
    let mut generics = generics.clone();
    for param in generics.type_params_mut() {
        param.bounds.push(parse_quote!(#bound));
    }
    generics
}

/// Returns the type's arguments with every type parameter replaced.
fn replaced(generics: &Generics, f: impl Fn(&Ident) -> Type) -> TokenStream {
    let arguments = generics.params.iter().map(|param| match param {
        GenericParam::Type(param) => {
            let ty = f(&param.ident);
            quote!(#ty)
        }
        GenericParam::Const(param) => {
            let ident = &param.ident;
            quote!(#ident)
        }
        _ => TokenStream::new(),
    });
    if generics.params.is_empty() { TokenStream::new() } else { quote!(<#(#arguments),*>) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(input: &DeriveInput) -> String {
        expand(input).unwrap_err().to_string()
    }

    #[test]
    fn types_other_than_structs_are_refused_with_advice() {
        let found = refusal(&parse_quote!(
            enum Sample {
                Image(Tensor),
                Text(Tensor),
            }
        ));
        assert!(found.starts_with("derive(Batch): expected a struct, found an enum"), "{found}");
        let found = refusal(&parse_quote!(
            union Sample {
                a: u8,
                b: u8,
            }
        ));
        assert!(found.starts_with("derive(Batch): expected a struct, found a union"), "{found}");
        assert!(
            refusal(&parse_quote!(
                struct Nothing;
            ))
            .contains("at least one field")
        );
        assert!(
            refusal(&parse_quote!(
                struct Nothing {}
            ))
            .contains("at least one field")
        );
        let borrowed = refusal(&parse_quote!(
            struct Borrowed<'a> {
                x: &'a Tensor,
            }
        ));
        assert!(borrowed.starts_with("a batch must own its tensors"), "{borrowed}");
    }

    #[test]
    fn unknown_options_are_refused() {
        let found = refusal(&parse_quote!(
            #[batch(skip)]
            struct Sample(Tensor);
        ));
        assert_eq!(found, "derive(Batch): expected `crate = \"…\"`");
        let found = refusal(&parse_quote!(
            struct Sample(#[batch(skip)] Tensor);
        ));
        assert!(found.starts_with("derive(Batch): fields have no options"), "{found}");
    }

    #[test]
    fn the_crate_can_be_another() {
        let expanded = expand(&parse_quote!(
            #[batch(crate = "brigade_data")]
            struct Sample(Tensor);
        ));
        let expanded = expanded.unwrap().to_string();
        assert!(expanded.contains("brigade_data :: __derive :: TensorTree for Sample"));
        assert!(!expanded.contains(":: brigade ::"));
    }
}
