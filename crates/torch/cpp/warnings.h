// libtorch's warnings.
#pragma once

#include "rust/cxx.h"

#include <c10/util/Exception.h>

#include <memory>
#include <string>

namespace brigade {

// Until it is dropped, warnings of this thread that contain the text are not shown.
class WarningFilter : private c10::WarningHandler {
 public:
  explicit WarningFilter(std::string text) : text_(std::move(text)) {}

 private:
  void process(const c10::Warning& warning) override {
    if (warning.msg().find(text_) == std::string::npos) {
      before_->process(warning);
    }
  }

  std::string text_;
  c10::WarningHandler* before_ = c10::WarningUtils::get_warning_handler();
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

inline std::unique_ptr<WarningFilter> filter_warnings(rust::Str text) {
  return std::make_unique<WarningFilter>(std::string(text));
}

} // namespace brigade
