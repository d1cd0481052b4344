/* What TorchTPU's libraries want of their surroundings, as one shared library that a program carries in itself and
 * loads before them (`tpu.cpp`):
 *
 * - The soname libtorch_python.so, which they need for functions of CPython. There is no interpreter here:
 *   `Py_IsInitialized` says so, and the other functions return what they return when they fail.
 * - `GetPjrtApi`: the plug-in's own, but where the plug-in refuses TorchTPU's options, which only libtpu has, a client
 *   is made with one device, of which XLA's client for CPUs would have several, or without options. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

char PyCFunction_Type[512];
char _Py_NoneStruct[64];
void* PyExc_TypeError;

int Py_IsInitialized(void) { return 0; }
int PyGILState_Ensure(void) { return 0; }
void PyGILState_Release(int state) { (void)state; }
void* PyThreadState_Get(void) { return NULL; }
void* PyThreadState_Swap(void* state) { (void)state; return NULL; }
void PyErr_Clear(void) {}
void PyErr_Print(void) {}
void PyErr_SetString(void* type, const char* text) { (void)type; (void)text; }
void _Py_Dealloc(void* object) { (void)object; }
void PyEval_SetProfile(void* function, void* object) { (void)function; (void)object; }
int PyType_IsSubtype(void* type, void* other) { (void)type; (void)other; return 0; }
void* PyCMethod_New(void* method, void* self, void* module, void* type) {
  (void)method; (void)self; (void)module; (void)type;
  return NULL;
}
void* PyFrame_GetCode(void* frame) { (void)frame; return NULL; }
void* PyImport_ImportModule(const char* name) { (void)name; return NULL; }
void* PyObject_CallMethod(void* object, const char* name, const char* format, ...) {
  (void)object; (void)name; (void)format;
  return NULL;
}
const char* PyUnicode_AsUTF8(void* text) { (void)text; return NULL; }

/* The beginning of the table of PJRT's C API, whose members only ever get successors. */
typedef struct {
  size_t struct_size;
  void* extension_start;
  size_t version_struct_size;
  void* version_extension_start;
  int major_version;
  int minor_version;
  void (*error_destroy)(void*);
  void* error_message;
  void* error_code;
  void* plugin_initialize;
  void* plugin_attributes;
  void* event_destroy;
  void* event_is_ready;
  void* event_error;
  void* event_await;
  void* event_on_ready;
  void* (*client_create)(void*);
} Api;

typedef struct {
  size_t struct_size;
  void* extension_start;
  const char* name;
  size_t name_size;
  int type;
  union {
    const char* text;
    int64_t number;
    const int64_t* numbers;
    float decimal;
    _Bool truth;
  } value;
  size_t value_size;
} NamedValue;

enum { NAMED_NUMBER = 1 };

typedef struct {
  size_t struct_size;
  void* extension_start;
  const void* options;
  size_t num_options;
} ClientCreateArgs;

typedef struct {
  size_t struct_size;
  void* extension_start;
  void* error;
} ErrorDestroyArgs;

static const Api* (*real_api)(void);
static const Api* real;

static void* client_create(void* raw) {
  static const char count[] = "cpu_device_count";
  const NamedValue one = {sizeof(NamedValue), NULL, count, sizeof(count) - 1, NAMED_NUMBER, {.number = 1}, 1};
  const NamedValue* const fewer[] = {&one, NULL};
  ClientCreateArgs* args = raw;
  void* error = real->client_create(args);
  for (size_t i = 0; error != NULL && args->num_options > 0 && i < sizeof(fewer) / sizeof(*fewer); ++i) {
    ErrorDestroyArgs destroy = {sizeof(ErrorDestroyArgs), NULL, error};
    real->error_destroy(&destroy);
    args->options = fewer[i];
    args->num_options = fewer[i] != NULL;
    error = real->client_create(args);
  }
  return error;
}

/* Names the plug-in; returns the reason why it cannot be opened. */
__attribute__((visibility("default"))) const char* brigade_set_pjrt_plugin(const char* path) {
  void* plugin = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (plugin == NULL) {
    return dlerror();
  }
  real_api = (const Api* (*)(void))dlsym(plugin, "GetPjrtApi");
  return real_api != NULL ? NULL : "the file has no function GetPjrtApi";
}

__attribute__((visibility("default"))) const Api* GetPjrtApi(void) {
  static Api* copy;
  if (copy != NULL || real_api == NULL) {
    return copy;
  }
  real = real_api();
  if (real == NULL || real->struct_size < sizeof(Api)) {
    return NULL;
  }
  copy = malloc(real->struct_size);
  if (copy != NULL) {
    memcpy(copy, real, real->struct_size);
    copy->client_create = client_create;
  }
  return copy;
}
