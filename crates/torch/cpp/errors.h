// How C++ exceptions reach Rust: with their kind.
//
// cxx turns an exception into one string. This replaces its handler, so that the string begins with
// one letter for the type; src/error.rs reads the letter.
#pragma once

#include <c10/util/Exception.h>
#include <gloo/common/error.h>

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

namespace brigade {

// What our own collectives throw.
struct TimeLimit : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct PeerLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Aborted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline std::string tagged(char kind, const std::string& what) {
  return std::string(1, kind) + what;
}

} // namespace brigade

namespace rust::behavior {

template <typename Try, typename Fail>
static void trycatch(Try&& attempt, Fail&& fail) noexcept {
  using brigade::tagged;
  try {
    attempt();
  } catch (const c10::DistStoreError& e) {
    fail(tagged('S', e.what_without_backtrace()).c_str());
  } catch (const c10::DistNetworkError& e) {
    fail(tagged('N', e.what_without_backtrace()).c_str());
  } catch (const c10::DistBackendError& e) {
    fail(tagged('B', e.what_without_backtrace()).c_str());
  } catch (const c10::DistError& e) {
    fail(tagged('D', e.what_without_backtrace()).c_str());
  } catch (const c10::NotImplementedError& e) {
    fail(tagged('U', e.what_without_backtrace()).c_str());
  } catch (const c10::OutOfMemoryError& e) {
    fail(tagged('M', e.what_without_backtrace()).c_str());
  } catch (const c10::Error& e) {
    fail(tagged('T', e.what_without_backtrace()).c_str());
  } catch (const brigade::TimeLimit& e) {
    fail(tagged('L', e.what()).c_str());
  } catch (const brigade::PeerLost& e) {
    fail(tagged('P', e.what()).c_str());
  } catch (const brigade::Aborted& e) {
    fail(tagged('A', e.what()).c_str());
  } catch (const gloo::IoException& e) {
    fail(tagged('G', e.what()).c_str());
  } catch (const std::bad_alloc& e) {
    fail(tagged('M', e.what()).c_str());
  } catch (const std::exception& e) {
    fail(tagged('R', e.what()).c_str());
  } catch (...) {
    fail("Ran exception that is not a std::exception");
  }
}

} // namespace rust::behavior
