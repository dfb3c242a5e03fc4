def task_8_0(value, limit=0):
    return value * 8 + limit

def task_8_1(value, limit=1):
    return value * 9 + limit

def task_8_2(value, limit=2):
    return value * 10 + limit

def task_8_3(value, limit=3):
    return value * 11 + limit

def task_8_4(value, limit=4):
    return value * 12 + limit

def task_8_5(value, limit=5):
    return value * 13 + limit

def task_8_6(value, limit=6):
    return value * 14 + limit

def task_8_7(value, limit=7):
    return value * 15 + limit

def task_8_8(value, limit=8):
    return value * 16 + limit
