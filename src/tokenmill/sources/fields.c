/* The compiled part of reading JSON Lines: fields of each line, put together by a template.

       line -> where the values of its fields are -> text

   A line is read here only if nothing about it is in doubt: an object in strict JSON, in which each
   field is there once and is a string that is valid Unicode. All others are left to the caller, who
   reads them as it would without this file; so what a line means, and why a bad one is rejected, is
   said in one place (`lines.py`). The caller has seen that the data are UTF-8.
*/

#define Py_LIMITED_API 0x030B0000  /* of Python 3.11; here, for every setuptools */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INTERFACE 1          /* lines.py wants this number */
#define MOST 32              /* fields and texts of a template */
#define DEEPEST 64           /* objects and lists within each other; Python reads deeper ones */
#define AT_A_TIME 8          /* bytes; so many may be written more than are wanted */
#define NO_ROOM "there is no room for the texts"
#define MOST_DIGITS 4000     /* Python has no numbers of more than 4,300 */
#define ONES UINT64_C(0x0101010101010101)
#define HIGHS UINT64_C(0x8080808080808080)

typedef const uint8_t *At;

typedef struct {
    At text;
    size_t size;
} Bytes;

/* Where a string is, without quotes; nowhere where it was not met. */
typedef struct {
    At begin, end;
} Value;

typedef struct {
    Bytes names[MOST];
    size_t num_names;
    struct {
        Bytes text;
        Py_ssize_t field;    /* -1: the text itself */
    } parts[MOST];
    size_t num_parts, first;
} Template;

static inline uint64_t load(At at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

/* The high bit of each byte that ends a run of plain characters: a quote, a backslash or a control
   character. Of these marks the lowest is right, and those above it need not be. */
static inline uint64_t marks(uint64_t word)
{
    uint64_t quote = word ^ ONES * '"', slash = word ^ ONES * '\\';
    return (((quote - ONES) & ~quote) | ((slash - ONES) & ~slash) |
            ((word - ONES * ' ') & ~word)) & HIGHS;
}

static inline int is_plain(uint8_t byte)
{
    return byte >= ' ' && byte != '"' && byte != '\\';
}

/* How many bytes are before the first that is marked. */
static inline size_t lowest(uint64_t marked)
{
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    return (size_t)__builtin_ctzll(marked) / 8;
#else
    (void)marked;
    return 0;                /* one by one, from here on */
#endif
}

/* The first byte from here on that is not plain, or the end. */
static inline At skip_plain(At at, At end)
{
    for (; end - at >= AT_A_TIME; at += AT_A_TIME) {
        uint64_t found = marks(load(at));
        if (found) {
            at += lowest(found);
            break;
        }
    }
    while (at < end && is_plain(*at))
        at++;
    return at;
}

/* Four hexadecimal digits; -1 where they are not. */
static int32_t unit_at(At at, At end)
{
    int32_t unit = 0;
    if (end - at < 4)
        return -1;
    for (int i = 0; i < 4; i++) {
        uint8_t digit = at[i], letter = digit | 0x20;
        if (digit >= '0' && digit <= '9')
            unit = unit << 4 | (digit - '0');
        else if (letter >= 'a' && letter <= 'f')
            unit = unit << 4 | (letter - 'a' + 10);
        else
            return -1;
    }
    return unit;
}

/* The character that `\u` before this place stands for, and the place after it; -1 where it is none,
   or half of one. */
static int32_t character_at(At *at, At end)
{
    int32_t high = unit_at(*at, end), low;
    *at += 4;
    if (high < 0xD800 || high > 0xDFFF)
        return high;
    if (high > 0xDBFF || end - *at < 6 || (*at)[0] != '\\' || (*at)[1] != 'u')
        return -1;
    low = unit_at(*at + 2, end);
    *at += 6;
    return low < 0xDC00 || low > 0xDFFF ? -1 : 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00);
}

/* What a character behind a backslash stands for; 0 where that is none, or `u`. */
static const uint8_t ESCAPED[256] = {
    ['"'] = '"', ['\\'] = '\\', ['/'] = '/', ['b'] = '\b',
    ['f'] = '\f', ['n'] = '\n', ['r'] = '\r', ['t'] = '\t',
};

static uint8_t *put_character(uint8_t *out, int32_t c)
{
    if (c < 0x80)
        *out++ = (uint8_t)c;
    else {
        if (c < 0x800)
            *out++ = (uint8_t)(0xC0 | c >> 6);
        else {
            if (c < 0x10000)
                *out++ = (uint8_t)(0xE0 | c >> 12);
            else {
                *out++ = (uint8_t)(0xF0 | c >> 18);
                *out++ = (uint8_t)(0x80 | (c >> 12 & 0x3F));
            }
            *out++ = (uint8_t)(0x80 | (c >> 6 & 0x3F));
        }
        *out++ = (uint8_t)(0x80 | (c & 0x3F));
    }
    return out;
}

/* The functions that read give the place after what they read; NULL where that is in doubt. */

/* The rest of a string. */
static At read_string(At at, At end)
{
    for (;;) {
        at = skip_plain(at, end);
        if (at == end || *at < ' ')
            return NULL;
        if (*at == '"')
            return at + 1;
        if (end - at < 2)
            return NULL;
        at += 2;
        if (at[-1] == 'u' ? character_at(&at, end) < 0 : !ESCAPED[at[-1]])
            return NULL;
    }
}

/* The same, and what it says: its own bytes, or else what is written to `room`, which has a byte
   for each of the string, and eight more. */
static At read_wanted(At at, At end, Value *value, uint8_t **room)
{
    At begin = at;
    uint8_t *out = *room;
    at = skip_plain(at, end);
    *value = (Value){begin, at};
    if (at < end && *at == '"')
        return at + 1;
    memcpy(out, begin, (size_t)(at - begin));
    out += at - begin;
    for (;;) {
        while (end - at >= AT_A_TIME) {
            uint64_t word = load(at), found = marks(word);
            memcpy(out, &word, sizeof word);
            if (found) {
                at += lowest(found);
                out += lowest(found);
                break;
            }
            at += AT_A_TIME;
            out += AT_A_TIME;
        }
        while (at < end && is_plain(*at))
            *out++ = *at++;
        if (at == end || *at < ' ')
            return NULL;
        if (*at == '"')
            break;
        if (end - at < 2)
            return NULL;
        at += 2;
        if (at[-1] == 'u') {
            int32_t c = character_at(&at, end);
            if (c < 0)
                return NULL;
            out = put_character(out, c);
        } else if (!(*out++ = ESCAPED[at[-1]]))
            return NULL;
    }
    *value = (Value){*room, out};
    *room = out;
    return at + 1;
}

static inline At skip_space(At at, At end)
{
    while (at < end && (*at == ' ' || *at == '\t' || *at == '\r' || *at == '\n'))
        at++;
    return at;
}

static inline At skip_digits(At at, At end)
{
    At begin = at;
    while (at < end && *at >= '0' && *at <= '9')
        at++;
    return at == begin || at - begin > MOST_DIGITS ? NULL : at;
}

static At read_number(At at, At end)
{
    at += *at == '-';
    if (at < end && *at == '0')
        at++;
    else if ((at = skip_digits(at, end)) == NULL)
        return NULL;
    if (at < end && *at == '.' && (at = skip_digits(at + 1, end)) == NULL)
        return NULL;
    if (at < end && (*at | 0x20) == 'e') {
        at++;
        at += at < end && (*at == '+' || *at == '-');
        at = skip_digits(at, end);
    }
    return at;
}

static inline At read_word(At at, At end, const char *word, size_t size)
{
    return (size_t)(end - at) >= size && memcmp(at, word, size) == 0 ? at + size : NULL;
}

static At read_members(At at, At end, int depth, const Template *template, Value *values,
                       uint8_t **room);

static At read_value(At at, At end, int depth)
{
    if (at == end)
        return NULL;
    switch (*at) {
    case '"': return read_string(at + 1, end);
    case 't': return read_word(at, end, "true", 4);
    case 'f': return read_word(at, end, "false", 5);
    case 'n': return read_word(at, end, "null", 4);
    case '{': return read_members(at + 1, end, depth + 1, NULL, NULL, NULL);
    case '[': break;
    default: return read_number(at, end);
    }
    if (depth == DEEPEST)
        return NULL;
    at = skip_space(at + 1, end);
    if (at < end && *at == ']')
        return at + 1;
    for (;;) {
        if ((at = read_value(at, end, depth + 1)) == NULL)
            return NULL;
        at = skip_space(at, end);
        if (at == end || (*at != ',' && *at != ']'))
            return NULL;
        if (*at == ']')
            return at + 1;
        at = skip_space(at + 1, end);
    }
}

/* The rest of an object; the values that are wanted of it are noted. */
static At read_members(At at, At end, int depth, const Template *template, Value *values,
                       uint8_t **room)
{
    if (depth > DEEPEST)
        return NULL;
    at = skip_space(at, end);
    if (at < end && *at == '}')
        return at + 1;
    for (;;) {
        At name = at + 1;
        Value *wanted = NULL;
        if (at == end || *at != '"' || (at = read_string(name, end)) == NULL)
            return NULL;
        if (template != NULL) {
            size_t size = (size_t)(at - 1 - name);
            if (memchr(name, '\\', size) != NULL)
                return NULL;  /* it may be one that is wanted */
            for (size_t i = 0; i < template->num_names; i++)
                if (size == template->names[i].size &&
                    memcmp(name, template->names[i].text, size) == 0)
                    wanted = values + i;
        }
        at = skip_space(at, end);
        if (at == end || *at != ':')
            return NULL;
        at = skip_space(at + 1, end);
        if (wanted == NULL)
            at = read_value(at, end, depth);
        else if (wanted->begin != NULL || at == end || *at != '"')
            return NULL;
        else
            at = read_wanted(at + 1, end, wanted, room);
        if (at == NULL)
            return NULL;
        at = skip_space(at, end);
        if (at == end || (*at != ',' && *at != '}'))
            return NULL;
        if (*at == '}')
            return at + 1;
        at = skip_space(at + 1, end);
    }
}

/* Whether the line has all fields. */
static int read_line(At at, At end, const Template *template, Value *values, uint8_t *room)
{
    memset(values, 0, template->num_names * sizeof *values);
    at = skip_space(at, end);
    if (at == end || *at != '{' ||
        (at = read_members(at + 1, end, 1, template, values, &room)) == NULL ||
        skip_space(at, end) != end)
        return 0;
    for (size_t i = 0; i < template->num_names; i++)
        if (values[i].begin == NULL)
            return 0;
    return 1;
}

static inline uint8_t *put(uint8_t *out, At text, size_t size)
{
    if (text != out)
        memcpy(out, text, size);
    return out + size;
}

/* Bytes that the text of a line has at most. */
static size_t bound(const Template *template, const Value *values)
{
    size_t size = 0;
    for (size_t i = 0; i < template->num_parts; i++) {
        Py_ssize_t field = template->parts[i].field;
        size += field < 0 ? template->parts[i].text.size
                          : (size_t)(values[field].end - values[field].begin);
    }
    return size;
}

static int take_bytes(PyObject *object, Bytes *bytes)
{
    char *text;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(object, &text, &size))
        return 0;
    *bytes = (Bytes){(At)text, (size_t)size};
    return 1;
}

/* What is borrowed of the tuples lives as long as they do. */
static int take_template(PyObject *names, PyObject *parts, Template *template)
{
    Py_ssize_t num_names = PyTuple_Size(names), num_parts = PyTuple_Size(parts);
    if (num_names < 0 || num_parts < 0)
        return 0;
    int is_right = num_names <= MOST && num_parts <= MOST;
    for (Py_ssize_t i = 0; is_right && i < num_names; i++)
        if (!take_bytes(PyTuple_GetItem(names, i), &template->names[i]))
            return 0;
    for (Py_ssize_t i = 0; is_right && i < num_parts; i++) {
        PyObject *part = PyTuple_GetItem(parts, i);
        template->parts[i].field = -1;
        if (PyLong_Check(part)) {
            Py_ssize_t field = template->parts[i].field = PyLong_AsSsize_t(part);
            is_right = field >= 0 && field < num_names;
        } else if (!take_bytes(part, &template->parts[i].text))
            return 0;
    }
    template->num_names = (size_t)num_names;
    template->num_parts = (size_t)num_parts;
    if (!is_right && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "the template has too many fields, or one without a name");
    return is_right;
}

static int are_numbers(const Py_buffer *buffer, Py_ssize_t count)
{
    return buffer->len == count * (Py_ssize_t)sizeof(int64_t) &&
           (uintptr_t)buffer->buf % _Alignof(int64_t) == 0;
}

PyDoc_STRVAR(fill_doc,
             "fill(data, starts, ends, names, parts, first, out, offsets, places, read)\n\n"
             "Put the template of each line together: `parts` are bytes, or the numbers of fields\n"
             "in `names`. Written are the texts to `out`, where they end to `offsets` (a 0 before\n"
             "them), how many bytes of each are before the part `first` to `places`, and to `read`\n"
             "whether the line was read; the text of one that was not is empty.");
static PyObject *fill(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer data, starts, ends, out, offsets, places, read;
    PyObject *names, *parts;
    Py_ssize_t first;
    Template template;
    if (!PyArg_ParseTuple(args, "y*y*y*O!O!nw*w*w*w*", &data, &starts, &ends, &PyTuple_Type, &names,
                          &PyTuple_Type, &parts, &first, &out, &offsets, &places, &read))
        return NULL;
    Py_ssize_t count = read.len;
    const char *wrong = NULL;
    int is_full = 0;
    if (!are_numbers(&starts, count) || !are_numbers(&ends, count) ||
        !are_numbers(&places, count) || !are_numbers(&offsets, count + 1))
        wrong = "there must be a start, an end and a place for each line";
    else if (take_template(names, parts, &template)) {
        const int64_t *begins = starts.buf, *stops = ends.buf;
        int64_t *bounds = offsets.buf, *befores = places.buf;
        uint8_t *begin = out.buf, *at = begin, *is_read = read.buf;
        At bytes = data.buf;
        /* A value alone is written to where it belongs. */
        int is_alone = template.num_names == 1 && template.num_parts == 1 &&
                       template.parts[0].field == 0;
        uint8_t *room = NULL;
        size_t room_size = 0;
        Py_BEGIN_ALLOW_THREADS
        bounds[0] = 0;
        for (Py_ssize_t i = 0; wrong == NULL && i < count; i++) {
            Value values[MOST];
            uint8_t *text = at;
            if (begins[i] < 0 || begins[i] > stops[i] || stops[i] > data.len) {
                wrong = "lines must be within the data";
                break;
            }
            size_t size = (size_t)(stops[i] - begins[i]) + AT_A_TIME;
            size_t left = (size_t)(begin + out.len - at);
            if (is_alone && size > left) {
                wrong = NO_ROOM;
                break;
            }
            if (!is_alone && size > room_size) {
                free(room);
                room = malloc(room_size = size < 1 << 20 ? 2 * size : size);
                if ((is_full = room == NULL))
                    break;
            }
            befores[i] = 0;
            is_read[i] = (uint8_t)read_line(bytes + begins[i], bytes + stops[i], &template, values,
                                            is_alone ? at : room);
            if (is_read[i] && bound(&template, values) > left)
                wrong = NO_ROOM;
            for (size_t k = 0; wrong == NULL && is_read[i] && k < template.num_parts; k++) {
                if ((Py_ssize_t)k == first)
                    befores[i] = at - text;
                Py_ssize_t field = template.parts[k].field;
                if (field < 0)
                    at = put(at, template.parts[k].text.text, template.parts[k].text.size);
                else
                    at = put(at, values[field].begin,
                             (size_t)(values[field].end - values[field].begin));
            }
            bounds[i + 1] = at - begin;
        }
        free(room);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&ends);
    PyBuffer_Release(&out);
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&places);
    PyBuffer_Release(&read);
    if (is_full)
        return PyErr_NoMemory();
    if (wrong != NULL)
        PyErr_SetString(PyExc_ValueError, wrong);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"fill", fill, METH_VARARGS, fill_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "fields", "The compiled part of reading JSON Lines.",
    -1,                    methods,  NULL,
    NULL,                  NULL,     NULL,
};

PyMODINIT_FUNC PyInit_fields(void)
{
    PyObject *module = PyModule_Create(&module_definition);
    if (module != NULL && (PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) ||
                           PyModule_AddIntConstant(module, "MOST", MOST) ||
                           PyModule_AddIntConstant(module, "AT_A_TIME", AT_A_TIME)))
        Py_CLEAR(module);
    return module;
}
