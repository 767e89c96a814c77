// What is asked of the system for every file of a folder, for many files in one call.

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#define BILLION 1000000000LL
#define NUMBERS 5
#define IN_NAME 2
#define DIGITS 18

// The numbers of a file: its size, the times of its last modification and of its last change in nanoseconds, its
// number, and that of its file system.
static void number(const struct stat* found, int64_t* numbers) {
    numbers[0] = found->st_size;
    numbers[1] = found->st_mtim.tv_sec * BILLION + found->st_mtim.tv_nsec;
    numbers[2] = found->st_ctim.tv_sec * BILLION + found->st_ctim.tv_nsec;
    numbers[3] = (int64_t)found->st_ino;
    numbers[4] = (int64_t)found->st_dev;
}

// Returns whether a name matches a pattern, in which * stands for a number without leading zeros, and writes these
// numbers, of which there are two at most.
static int matches(const char* pattern, const char* name, int64_t* numbers) {
    for (; *pattern != '\0'; ++pattern) {
        if (*pattern != '*') {
            if (*name++ != *pattern) return 0;
            continue;
        }
        const char* const first = name;
        int64_t value = 0;
        while (*name >= '0' && *name <= '9' && name - first < DIGITS) value = 10 * value + (*name++ - '0');
        if (name == first || (*first == '0' && name - first > 1)) return 0;
        *numbers++ = value;
    }
    return *name == '\0';
}

// Writes, for up to `most` files of a folder whose names match a pattern, their numbers and the two in their names.
// Returns how many they are, which is less than `most` at the end; or −errno. What is gone, or leads nowhere, is left
// out. The size of a file that cannot be looked at is −1.
static int64_t next(DIR* folder, int64_t most, const char* pattern, int64_t* numbers, int64_t* in_names) {
    int64_t count = 0;
    while (count < most) {
        errno = 0;
        const struct dirent* const entry = readdir(folder);
        if (entry == NULL) return errno == 0 ? count : -errno;
        if (!matches(pattern, entry->d_name, in_names + IN_NAME * count)) continue;
        struct stat found;
        int64_t* const to = numbers + NUMBERS * count;
        if (fstatat(dirfd(folder), entry->d_name, &found, 0) == 0) {
            number(&found, to);
        } else if (errno == ENOENT) {
            continue;
        } else {
            memset(to, 0, NUMBERS * sizeof *to);
            to[0] = -1;
        }
        ++count;
    }
    return count;
}

// Where a listing of several folders stands: the number of the folder that comes next, where its name begins, the folder
// itself where it is open, and the errno of what has failed.
enum { FOLDER, NAME, OPEN, ERROR };

// Writes, for up to `most` files that `next` finds in `count` folders, the number of their folder and what `next`
// writes. The names of the folders follow each other in `names` and each end with 0. `state` is 0 at first. Returns how
// many files they are, which is less than `most` at the end, and where a folder cannot be opened or read.
int64_t listing_files(const char* names, int64_t count, const char* pattern, int64_t most, int64_t* state, int64_t* at,
                      int64_t* numbers, int64_t* in_names) {
    int64_t found = 0;
    state[ERROR] = 0;
    while (state[FOLDER] < count && found < most) {
        const char* const name = names + state[NAME];
        DIR* const folder = state[OPEN] != 0 ? (DIR*)(intptr_t)state[OPEN] : opendir(name);
        if (folder == NULL) {
            state[ERROR] = errno;
            return found;
        }
        state[OPEN] = (int64_t)(intptr_t)folder;
        const int64_t room = most - found;
        const int64_t some = next(folder, room, pattern, numbers + NUMBERS * found, in_names + IN_NAME * found);
        if (some < 0) {
            state[ERROR] = -some;
            return found;
        }
        for (int64_t i = 0; i < some; ++i) at[found + i] = state[FOLDER];
        found += some;
        if (some < room) {
            closedir(folder);
            state[OPEN] = 0;
            state[NAME] += (int64_t)strlen(name) + 1;
            ++state[FOLDER];
        }
    }
    return found;
}

// Closes the folder that a listing has left open.
void listing_close(const int64_t* state) {
    if (state[OPEN] != 0) closedir((DIR*)(intptr_t)state[OPEN]);
}

// Renames `count` files, whose old and new names follow each other in `names` and each end with 0, and writes the
// numbers that they have then. Returns how many were renamed; errno says why the next was not.
int64_t listing_rename(const char* names, int64_t count, int64_t* numbers) {
    for (int64_t at = 0; at < count; ++at) {
        const char* const to = names + strlen(names) + 1;
        struct stat found;
        if (rename(names, to) != 0 || stat(to, &found) != 0) return at;
        number(&found, numbers + NUMBERS * at);
        names = to + strlen(to) + 1;
    }
    return count;
}
