// One kernel as a launch calls it. SIMT_KERNEL is its name expression, behind the text that defines it: arguments, one
// pointer each as cuLaunchKernel has them, are read as what the kernel's own signature says.
#pragma once
#include <type_traits>
#include <utility>

#include "machine.hpp"

namespace simt {

template <auto kernel>
struct Parameters;

template <class... P, void (*kernel)(P...)>
struct Parameters<kernel> {
  static void call(void** args) { with(args, std::index_sequence_for<P...>{}); }

  // What reads the launch's own pointers is not watched.
  template <size_t... i>
  __attribute__((no_sanitize_thread)) static void with(void** args, std::index_sequence<i...>) {
    kernel(*static_cast<std::remove_cv_t<P>*>(args[i])...);
  }
};

// "... [with P = {const float*, int}]", the types as the compiler prints them.
template <class... P>
constexpr const char* printed(void (*)(P...)) {
  return __PRETTY_FUNCTION__;
}

}  // namespace simt

#define SIMT_TEXT(...) #__VA_ARGS__
#define SIMT_NAME(...) SIMT_TEXT(__VA_ARGS__)
extern "C" const simt::Entry simt_entry = {
    simt::Parameters<&SIMT_KERNEL>::call,
    simt::printed(&SIMT_KERNEL),
    SIMT_NAME(SIMT_KERNEL),
};
