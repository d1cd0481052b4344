// How C++ exceptions reach Rust: with their kind.
//
// cxx turns an exception into one string. This replaces its handler, so that the string begins with
// one letter for the kind; src/error.rs reads the letter.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace brigade {

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
  } catch (const std::exception& e) {
    // Gloo's own exceptions (time-outs, closed connections) are plain std::runtime_error to us.
    fail(tagged('R', e.what()).c_str());
  } catch (...) {
    fail("Ran exception that is not a std::exception");
  }
}

} // namespace rust::behavior
