//! The attributes of `brigade-test-needs`, which documents them. For development only.

use proc_macro::TokenStream;
use quote::quote;
use syn::parse::{Nothing, Parse, ParseStream};
use syn::{Expr, Ident, ItemFn, Token, parse_macro_input};

/// Marks a test that cannot run without the [needs](../brigade_test_needs/enum.Need.html) that are named:
/// `#[needs(Hosts, Etcd)]`, or `#[needs()]` for a test that runs everywhere.
///
/// A test that compiles names its time limit in seconds: `#[needs(Python, limit = 1000)]`. Defaults to 225 s.
///
/// For test programs with `brigade_test_needs::main!`. The test fails by a panic. Its name is its path in the program.
#[proc_macro_attribute]
pub fn needs(arguments: TokenStream, item: TokenStream) -> TokenStream {
    let Needs { needs, limit } = parse_macro_input!(arguments as Needs);
    let item = parse_macro_input!(item as ItemFn);
    let name = &item.sig.ident;
    let limit = limit.map_or_else(
        || quote!(::core::option::Option::None),
        |seconds| quote!(::core::option::Option::Some(::core::time::Duration::from_secs(#seconds))),
    );
    quote! {
        #item
        const _: () = {
            ::brigade_test_needs::__private::inventory::submit! {
                ::brigade_test_needs::Test {
                    path: ::core::concat!(::core::module_path!(), "::", ::core::stringify!(#name)),
                    needs: &[#(::brigade_test_needs::Need::#needs),*],
                    limit: #limit,
                    body: #name,
                }
            }
        };
    }
    .into()
}

/// Arguments of [`needs`].
struct Needs {
    needs: Vec<Ident>,
    /// Time limit in seconds.
    limit: Option<Expr>,
}

impl Parse for Needs {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let mut all = Self { needs: Vec::new(), limit: None };
        while !input.is_empty() {
            let name: Ident = input.parse()?;
            if name == "limit" {
                input.parse::<Token![=]>()?;
                all.limit = Some(input.parse()?);
            } else {
                all.needs.push(name);
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(all)
    }
}

/// Marks a function that a test program runs in a process of its own: its tests start the program once more, with the
/// arguments `--part` and the function's path in the program.
#[proc_macro_attribute]
pub fn part(arguments: TokenStream, item: TokenStream) -> TokenStream {
    let Nothing = parse_macro_input!(arguments as Nothing);
    let item = parse_macro_input!(item as ItemFn);
    let name = &item.sig.ident;
    quote! {
        #item
        const _: () = {
            ::brigade_test_needs::__private::inventory::submit! {
                ::brigade_test_needs::Part {
                    path: ::core::concat!(::core::module_path!(), "::", ::core::stringify!(#name)),
                    body: #name,
                }
            }
        };
    }
    .into()
}
