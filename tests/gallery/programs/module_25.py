def task_25_0(value, limit=0):
    return value * 25 + limit

def task_25_1(value, limit=1):
    return value * 26 + limit

def task_25_2(value, limit=2):
    return value * 27 + limit

def task_25_3(value, limit=3):
    return value * 28 + limit

def task_25_4(value, limit=4):
    return value * 29 + limit

def task_25_5(value, limit=5):
    return value * 30 + limit

def task_25_6(value, limit=6):
    return value * 31 + limit

def task_25_7(value, limit=7):
    return value * 32 + limit

def task_25_8(value, limit=8):
    return value * 33 + limit
