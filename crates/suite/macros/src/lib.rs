//! The attributes of `brigade-suite`, which documents them. For development only.

use proc_macro::TokenStream;
use quote::quote;
use syn::parse::Nothing;
use syn::punctuated::Punctuated;
use syn::{Ident, ItemFn, Token, parse_macro_input};

/// Marks a test that cannot run without the [needs](../brigade_suite/enum.Need.html) that are named:
/// `#[needs(Hosts, Etcd)]`, or `#[needs()]` for a test that runs everywhere.
///
/// For test programs with `brigade_suite::main!`. The test fails by a panic. Its name is its path in the program.
#[proc_macro_attribute]
pub fn needs(arguments: TokenStream, item: TokenStream) -> TokenStream {
    let needs = parse_macro_input!(arguments with Punctuated::<Ident, Token![,]>::parse_terminated);
    let item = parse_macro_input!(item as ItemFn);
    let (name, needs) = (&item.sig.ident, needs.iter());
    quote! {
        #item
        const _: () = {
            ::brigade_suite::__private::inventory::submit! {
                ::brigade_suite::Test {
                    path: ::core::concat!(::core::module_path!(), "::", ::core::stringify!(#name)),
                    needs: &[#(::brigade_suite::Need::#needs),*],
                    body: #name,
                }
            }
        };
    }
    .into()
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
            ::brigade_suite::__private::inventory::submit! {
                ::brigade_suite::Part {
                    path: ::core::concat!(::core::module_path!(), "::", ::core::stringify!(#name)),
                    body: #name,
                }
            }
        };
    }
    .into()
}
