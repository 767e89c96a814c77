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

// The numbers of a file: its size, the times of its last modification and of its last change in nanoseconds, its
// number, and that of its file system.
static void number(const struct stat* found, int64_t* numbers) {
    numbers[0] = found->st_size;
    numbers[1] = found->st_mtim.tv_sec * BILLION + found->st_mtim.tv_nsec;
    numbers[2] = found->st_ctim.tv_sec * BILLION + found->st_ctim.tv_nsec;
    numbers[3] = (int64_t)found->st_ino;
    numbers[4] = (int64_t)found->st_dev;
}

// Opens a folder for `listing_next`. Returns NULL, and sets errno, where that fails.
void* listing_open(const char* folder) { return opendir(folder); }

void listing_close(void* folder) { closedir(folder); }

// Writes the numbers of up to `most` files, and their names, which each end with 0 and take up to 256 bytes. Returns how
// many they are, which is 0 at the end; or −errno. What is gone, or leads nowhere, is left out. The size of a file that
// cannot be looked at is −1. `used`: the bytes of the names.
int64_t listing_next(void* folder, int64_t most, int64_t* numbers, char* names, int64_t* used) {
    int64_t count = 0;
    *used = 0;
    while (count < most) {
        errno = 0;
        const struct dirent* const entry = readdir(folder);
        if (entry == NULL) return errno == 0 ? count : -errno;
        if (entry->d_name[0] == '.') continue;
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
        const size_t length = strlen(entry->d_name) + 1;
        memcpy(names + *used, entry->d_name, length);
        *used += (int64_t)length;
        ++count;
    }
    return count;
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
