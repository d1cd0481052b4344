// Pieces of files, mapped for reading, that can be cut short without ending the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace brigade {

// A mapped piece of a file. A page of it that the file does not have any more, or the disk cannot give,
// reads as zeros, and `window_is_sound` is false from then on.
class Window {
 public:
  Window(void* start, size_t length, size_t skipped, size_t slot)
      : start_(start), length_(length), skipped_(skipped), slot_(slot) {}
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  size_t address() const {
    return reinterpret_cast<size_t>(start_) + skipped_;
  }
  bool is_sound() const;

 private:
  void* start_;
  size_t length_;
  // Between the page's begin and the first byte that was asked for.
  size_t skipped_;
  size_t slot_;
};

// Null where the file or the system cannot map, or no guard can be had: then the file is to be read.
std::unique_ptr<Window> map_window(int32_t file, uint64_t offset, size_t bytes);
// Of the first byte that was asked for.
size_t window_address(const Window& window);
bool window_is_sound(const Window& window);

} // namespace brigade
